//! The Rust example engine: what it prints, alone and when a rank dies.

use std::process::{Command, Output};

fn engine(arguments: &[&str]) -> Output {
    // It ends by its own budgets, the longest of which is a vote's.
    let program = env!("CARGO_BIN_EXE_engine-rust");
    Command::new(program).args(arguments).output().unwrap()
}

fn lines(output: &Output) -> Vec<&str> {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout)
        .unwrap()
        .lines()
        .collect()
}

#[test]
fn steps_run_by_graphs_and_by_its_own_forward() {
    let output = engine(&["--ranks", "3", "--steps", "20"]);
    assert_eq!(
        lines(&output),
        [
            // Every fifth step has five requests, and no graph is that large.
            "rank 0: 16 steps by graphs, 4 by its own forward in its last group",
            "rank 1: 16 steps by graphs, 4 by its own forward in its last group",
            "rank 2: 16 steps by graphs, 4 by its own forward in its last group",
            "20 steps, every result right",
        ]
    );
}

#[test]
fn the_others_go_on_when_a_rank_dies() {
    let output = engine(&["--ranks", "3", "--steps", "20", "--kill", "7"]);
    let missing = "[401] rank 2 did not answer the vote of epoch 8 by the deadline";
    assert_eq!(
        lines(&output),
        [
            &format!("rank 0 saw at step 7: {missing}"),
            &format!("rank 1 saw at step 7: {missing}"),
            "rank 2 died",
            "rank 0: 10 steps by graphs, 3 by its own forward in its last group",
            "rank 1: 10 steps by graphs, 3 by its own forward in its last group",
            "rank 2: 10 steps by graphs, 3 by its own forward in its last group",
            "20 steps, every result right",
        ]
    );
}

#[test]
fn more_ranks_than_the_kernels_were_built_for_are_a_decline() {
    let output = engine(&["--ranks", "9"]);
    let words = "Error: \"[102] tp_size is 9; these kernels need 1, 2, 3 or 4 (change: --tp)\"\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), words);
    assert!(!output.status.success() && output.stdout.is_empty());
}
