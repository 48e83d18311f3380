//! The guard: each requirement accepts, refuses in words, and hides no other.

use std::collections::{BTreeMap, BTreeSet};

use lowlat_core::guard::{Divides, Feature, OneOf, Value};
use lowlat_core::{Facts, Reason, Requirements, guard};

fn facts() -> Facts {
    Facts {
        isa: "sm_90".into(),
        tp_size: 4,
        dtype: Some("bfloat16".into()),
        model: BTreeMap::from([
            ("heads".to_owned(), Value::Int(64)),
            ("eps".to_owned(), Value::Float(1e-20)),
        ]),
        server_args: BTreeMap::from([("overlap".to_owned(), Value::Bool(false))]),
        env: BTreeMap::from([("LAYOUT".to_owned(), Value::from("v4"))]),
        resident_blocks: Some(132),
        features: BTreeSet::new(),
    }
}

fn open() -> Requirements {
    Requirements::new("toy", &["sm_90"])
}

/// `requirements` refuse the facts in exactly these words.
fn check(requirements: &Requirements, facts: &Facts, expected: &[&str]) {
    let declines = guard(facts, requirements).err().unwrap_or_default();
    let texts: Vec<String> = declines.iter().map(ToString::to_string).collect();
    assert_eq!(texts, expected);
}

#[test]
fn empty_requirements_accept_anything_but_the_machine_code() {
    check(&open(), &facts(), &[]);
    let nothing = Requirements::new("toy", &[]);
    let expected = "[101] isa is sm_90; these kernels need one that is built, and none is";
    check(&nothing, &facts(), &[expected]);
    check(
        &open(),
        &Facts {
            isa: "sm_90".into(),
            tp_size: 1,
            ..Facts::default()
        },
        &[],
    );
}

#[test]
fn each_requirement_refuses_by_name_and_accepts_its_own_value() {
    let mut needs = open();
    needs.dtypes = vec!["float32".into(), "float16".into()];
    let expected = "[103] dtype is bfloat16; these kernels need float32 or float16 \
                    (change: --dtype float32)";
    check(&needs, &facts(), &[expected]);
    needs.dtypes.push("bfloat16".into());
    check(&needs, &facts(), &[]);

    let mut needs = open();
    needs.model = vec![OneOf::new("eps", [1e-6]), OneOf::new("rope", [64])];
    check(
        &needs,
        &facts(),
        &[
            "[104] eps is 0.00000000000000000001; these kernels need 0.000001",
            "[104] rope is not set; these kernels need 64",
        ],
    );

    let mut needs = open();
    needs.server_args = vec![OneOf::new("overlap", [true])];
    let expected = "[106] overlap is false; these kernels need true (change: --overlap)";
    check(&needs, &facts(), &[expected]);
    needs.server_args = vec![OneOf::new("overlap", [false])];
    check(&needs, &facts(), &[]);

    let mut needs = open();
    needs.env = vec![
        OneOf::new("LAYOUT", ["v41"]),
        OneOf::new("UNSET", [1]).or_unset(),
    ];
    let expected = "[107] LAYOUT is v4; these kernels need v41 (change: LAYOUT=v41)";
    check(&needs, &facts(), &[expected]);
}

#[test]
fn a_size_must_divide_into_whole_units_on_every_rank() {
    let mut needs = open();
    needs.divides = vec![Divides::new("heads", 16)];
    check(&needs, &facts(), &[]);
    needs.divides = vec![
        Divides::new("heads", 32),
        Divides::new("eps", 1),
        Divides::new("gone", 1),
    ];
    check(
        &needs,
        &facts(),
        &[
            "[105] heads is 64; these kernels need a multiple of 32 x tp_size (32 x 4 = 128) \
             (change: --tp)",
            "[105] eps is 0.00000000000000000001; these kernels need a multiple of tp_size (4) \
             (change: --tp)",
            "[105] gone is not set; these kernels need a multiple of tp_size (4) (change: --tp)",
        ],
    );
}

#[test]
fn a_group_of_no_ranks_is_refused_and_divides_nothing_by_zero() {
    let mut needs = open();
    needs.divides = vec![Divides::new("heads", 1)];
    let facts = Facts {
        tp_size: 0,
        ..facts()
    };
    let expected = "[102] tp_size is 0; these kernels need at least 1 (change: --tp)";
    check(&needs, &facts, &[expected]);
}

#[test]
fn resident_blocks_are_checked_only_where_a_device_was_asked() {
    let needs = Requirements {
        resident_blocks: 133,
        ..open()
    };
    let declines = guard(&facts(), &needs).unwrap_err();
    assert_eq!(declines.len(), 1);
    assert_eq!(declines[0].reason, Reason::ResidentBlocks);
    check(
        &needs,
        &Facts {
            resident_blocks: None,
            ..facts()
        },
        &[],
    );
}

#[test]
fn every_feature_is_refused_unless_accepted() {
    for feature in Feature::all() {
        let facts = Facts {
            features: BTreeSet::from([feature]),
            ..facts()
        };
        let declines = guard(&facts, &open()).unwrap_err();
        assert_eq!(declines.len(), 1);
        assert_eq!(declines[0].reason, Reason::Feature);
        assert_eq!(declines[0].change.as_deref(), Some(feature.off()));
        check(
            &Requirements {
                features: BTreeSet::from([feature]),
                ..open()
            },
            &facts,
            &[],
        );
    }
}

#[test]
fn what_was_checked_is_in_the_digest() {
    let base = guard(&facts(), &open()).unwrap();
    let again = guard(&facts(), &open()).unwrap();
    assert_eq!(base.digest(), again.digest());
    let mut other = facts();
    other.model.insert("heads".into(), Value::Int(32));
    assert_ne!(base.digest(), guard(&other, &open()).unwrap().digest());
    let stricter = Requirements {
        resident_blocks: 1,
        ..open()
    };
    assert_ne!(base.digest(), guard(&facts(), &stricter).unwrap().digest());
}
