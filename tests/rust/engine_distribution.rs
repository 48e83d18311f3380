//! Sampling: speculation changes no distribution, and a simulated acceptance has the length that
//! was asked for. Statistics with fixed seeds, so the outcome is the same on every run.

use lowlat_engine::sched::simulated_accept;
use lowlat_engine::step::RuntimeSettings;

#[path = "support/engine.rs"]
mod support;
use support::{MODELS, Request, library, pocket, prompt, serve, settings, start_config};

const VOCAB: usize = 32;
/// Tokens a request: the first is the prompt's, the others pass through drafts.
const OUTPUT: usize = 4;

/// `num` continuations of one prompt, each with draws of its own.
fn continuations(
    library: &std::path::Path,
    model: &str,
    speculative: bool,
    num: u32,
    seed: u64,
) -> Vec<Vec<i32>> {
    let settings = RuntimeSettings {
        speculative,
        seed,
        kv_tokens: 1024,
        ..settings(library)
    };
    let mut runtime = start_config(settings, pocket(model));
    let requests: Vec<_> = (0..num)
        .map(|uid| Request {
            prompt: prompt(3, 5, 29),
            output: OUTPUT,
            // Where a dozen tokens or more share the probability, but not evenly.
            temperature: if model == "tiny-v4" { 2.0 } else { 3.0 },
            uid,
        })
        .collect();
    serve(&mut runtime, &requests, 8, 8, |_| None).tokens
}

/// Two-sample chi-square of counts over cells. Cells with fewer than 10 in both samples together
/// are put together. Gives the statistic and its degrees of freedom.
fn chi_square(a: &[u32], b: &[u32]) -> (f64, usize) {
    let (total_a, total_b): (u32, u32) = (a.iter().sum(), b.iter().sum());
    let mut cells: Vec<(u32, u32)> = Vec::new();
    let mut rare = (0, 0);
    for (&a, &b) in a.iter().zip(b) {
        if a + b < 10 {
            rare = (rare.0 + a, rare.1 + b);
        } else {
            cells.push((a, b));
        }
    }
    if rare.0 + rare.1 > 0 {
        cells.push(rare);
    }
    let (scale_a, scale_b) = (
        (f64::from(total_b) / f64::from(total_a)).sqrt(),
        (f64::from(total_a) / f64::from(total_b)).sqrt(),
    );
    let statistic = cells
        .iter()
        .map(|&(a, b)| {
            let (a, b) = (f64::from(a), f64::from(b));
            (scale_a * a - scale_b * b).powi(2) / (a + b)
        })
        .sum();
    (statistic, cells.len() - 1)
}

/// The chi-square that one run in ten thousand exceeds (Wilson and Hilferty's cube).
fn bound(degrees: usize) -> f64 {
    let degrees = degrees as f64;
    let spread = 2.0 / (9.0 * degrees);
    degrees * (1.0 - spread + 3.719 * spread.sqrt()).powi(3)
}

/// Counts of the token at `place`, and of pairs from there.
fn counts(runs: &[Vec<i32>], place: usize, pairs: bool) -> Vec<u32> {
    let mut counts = vec![0; if pairs { VOCAB * VOCAB } else { VOCAB }];
    for tokens in runs {
        let cell = match pairs {
            true => tokens[place] as usize * VOCAB + tokens[place + 1] as usize,
            false => tokens[place] as usize,
        };
        counts[cell] += 1;
    }
    counts
}

/// Proved by coins of 0 in verify steps, with which every draft is accepted: pairs of the first
/// two tokens then stand at 3073 with 45 degrees of freedom.
#[test]
fn speculation_changes_no_distribution() {
    let Some(library) = library() else { return };
    for model in MODELS {
        has_one_distribution(&library, model);
    }
}

fn has_one_distribution(library: &std::path::Path, model: &str) {
    // V4's smallest step costs more.
    let num = if model == "tiny-v4" { 1000 } else { 1600 };
    let speculative = continuations(library, model, true, num, 1);
    let plain = continuations(library, model, false, num, 2);
    for place in 0..OUTPUT {
        for pairs in [false, true] {
            if pairs && place + 1 == OUTPUT {
                continue;
            }
            let (a, b) = (
                counts(&speculative, place, pairs),
                counts(&plain, place, pairs),
            );
            let (statistic, degrees) = chi_square(&a, &b);
            println!("{model}: token {place}, pairs {pairs}: {statistic:.1} at {degrees} degrees");
            // A distribution with one likely token would prove little.
            assert!(
                degrees >= 5,
                "{model}, token {place}: {degrees} degrees of freedom"
            );
            assert!(
                statistic < bound(degrees),
                "{model}, token {place}: {statistic} at {degrees}"
            );
        }
    }
    // The test can see a difference: the same draws with every token moved on at its second
    // place, one time in four, are found out.
    let mut bent = speculative.clone();
    for (run_idx, tokens) in bent.iter_mut().enumerate() {
        if run_idx % 4 == 0 {
            tokens[1] = (tokens[1] + 1) % VOCAB as i32;
        }
    }
    let (statistic, degrees) = chi_square(&counts(&bent, 1, false), &counts(&plain, 1, false));
    println!("{model}: bent, {statistic:.1} at {degrees} degrees");
    assert!(
        statistic > bound(degrees),
        "a bent sample passed: {statistic} at {degrees}"
    );
}

#[test]
fn simulated_acceptance_has_its_length() {
    let Some(library) = library() else { return };
    for model in MODELS {
        has_its_length(&library, model);
    }
}

fn has_its_length(library: &std::path::Path, model: &str) {
    let settings = RuntimeSettings {
        kv_tokens: 1024,
        max_batch: 1,
        ..settings(library)
    };
    let mut runtime = start_config(settings, pocket(model));
    let mut counts: Vec<u32> = Vec::new();
    let mut uid = 0;
    while counts.len() < 2000 {
        let first = counts.len();
        let request = Request {
            prompt: prompt(9, 4, 29),
            output: 400,
            temperature: 0.0,
            uid,
        };
        let run = serve(&mut runtime, &[request], 1, 8, |step| {
            Some(simulated_accept(3.51, 11, (first + step) as u64))
        });
        counts.extend(run.step_counts);
        uid += 1;
    }
    counts.truncate(2000);
    assert!(counts.iter().all(|count| (3..=4).contains(count)));
    let mean = f64::from(counts.iter().sum::<u32>()) / 2000.0;
    assert!((mean - 3.51).abs() <= 0.04, "{model}: {mean}");
}
