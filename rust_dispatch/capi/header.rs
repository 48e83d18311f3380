//! Makes the text of the C header; shared by the tool that writes it and the test that compares.

use std::path::{Path, PathBuf};

/// Where the committed header lies.
pub fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include/lowlat/dispatch.h")
}

/// What the header must hold.
pub fn text() -> String {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(crate_dir.join("cbindgen.toml"))
        .expect("cbindgen.toml is well formed");
    // Constants are written here, because the generator would add all of core's.
    config.after_includes = Some(format!(
        "\n/** The ABI of this header, for lowlat_dispatch_check_abi. */\n\
         #define LOWLAT_DISPATCH_ABI_VERSION {}u\n\
         \n/** Words of a ballot, see lowlat_ballot_words. */\n\
         #define LOWLAT_BALLOT_WORDS {}u",
        lowlat_capi::lowlat_dispatch_abi_version(),
        lowlat_core::vote::BALLOT_WORDS
    ));
    let bindings = cbindgen::generate_with_config(crate_dir, config).expect("the crate parses");
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).expect("a header is text")
}
