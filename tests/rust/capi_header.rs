//! The committed C header is what the crate says now.

#[path = "../../rust_dispatch/capi/header.rs"]
mod header;

#[test]
fn the_committed_header_is_not_stale() {
    let committed = std::fs::read_to_string(header::path()).expect("the header is committed");
    assert!(
        committed == header::text(),
        "dispatch.h is stale; run `make header`"
    );
}

/// The generator reads sources, not what the compiler made of them; so the numbers are compared.
#[test]
fn every_reason_has_its_number_in_the_header() {
    let committed = std::fs::read_to_string(header::path()).expect("the header is committed");
    for reason in lowlat_core::Reason::ALL {
        let line = format!(
            "LOWLAT_REASON_{} = {},",
            reason.name().to_uppercase(),
            reason.number()
        );
        assert!(committed.contains(&line), "{line}");
    }
    let count = committed.matches("\n  LOWLAT_REASON_").count();
    assert_eq!(count, lowlat_core::Reason::ALL.len());
}
