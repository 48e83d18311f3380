//! What makes the tiny models worth testing with: their text is varied and their draft is right
//! now and then. Without that the equality tests would compare a loop with itself.

use std::collections::HashSet;

use lowlat_core::config::{ModelConfig, built_in};
use lowlat_engine::step::RuntimeSettings;
use lowlat_engine::weights::SeededWeights;

#[path = "support/engine.rs"]
mod support;
use support::{MODELS, Request, library, prompt, serve, settings, start};

fn requests(temperature: f32) -> Vec<Request> {
    (0..4)
        .map(|uid| Request {
            prompt: prompt(u64::from(uid) + 1, 40, 500),
            output: 64,
            temperature,
            uid,
        })
        .collect()
}

#[test]
fn greedy_text_is_varied_and_the_draft_is_sometimes_right() {
    let Some(library) = library() else { return };
    for model in MODELS {
        is_worth_testing_with(&library, model);
    }
}

fn is_worth_testing_with(library: &std::path::Path, model: &str) {
    let mut runtime = start(RuntimeSettings {
        model: model.into(),
        ..settings(library)
    });
    let run = serve(&mut runtime, &requests(0.0), 4, 128, |_| None);
    let mean = run.step_counts.iter().sum::<u32>() as f64 / run.step_counts.len() as f64;
    let mut histogram = [0; 6];
    for count in &run.step_counts {
        histogram[*count as usize - 1] += 1;
    }
    println!("{model}: tokens a step {mean:.2}, by accepted drafts {histogram:?}");
    assert!((1.5..4.0).contains(&mean), "tokens a step {mean}");
    // Every length occurs: each place of the acceptance rule is met.
    assert!(histogram.iter().all(|count| *count > 0), "{histogram:?}");
    let mut pairs = HashSet::new();
    for tokens in &run.tokens {
        assert_eq!(tokens.len(), 64);
        let distinct: HashSet<_> = tokens.iter().collect();
        assert!(
            distinct.len() > 32,
            "{} distinct tokens of 64",
            distinct.len()
        );
        pairs.extend(tokens.windows(2).map(|pair| (pair[0], pair[1])));
    }
    // The walk that the weights know is followed often, and left often: context decides.
    let config = ModelConfig::from_json(built_in(model).unwrap()).unwrap();
    let weights = SeededWeights::new(&config, 0);
    let follows = |(token, next): &&(i32, i32)| weights.successor(*token as u32) == *next as u32;
    let share = pairs.iter().filter(follows).count() as f64 / pairs.len() as f64;
    assert!(
        (0.3..0.9).contains(&share),
        "{share} of the pairs follow the walk"
    );
    let firsts: HashSet<_> = pairs.iter().map(|pair| pair.0).collect();
    assert!(
        pairs.len() >= firsts.len() + 10,
        "{} pairs of {}",
        pairs.len(),
        firsts.len()
    );
}
