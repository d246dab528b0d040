//! What predictors learn, and what they do not.

use super::*;

fn guess(p: &mut dyn Predictor, layer: usize) -> Vec<u32> {
    let mut out = Vec::new();
    p.predict(layer, &mut out);
    assert!(out.windows(2).all(|w| (w[1].score, w[0].expert) < (w[0].score, w[1].expert)), "{out:?}");
    out.iter().map(|s| s.expert).collect()
}

fn token(p: &mut dyn Predictor, layers: &[&[u32]]) {
    for (l, set) in layers.iter().enumerate() {
        p.observe(l, set, set.len());
    }
}

#[test]
fn correlation_learns_which_expert_follows_which() {
    let mut c = Correlation::new(&[4, 4, 4], 1);
    c.observe(0, &[1, 2], 2);
    assert!(guess(&mut c, 1).is_empty(), "nothing seen yet");
    c.observe(1, &[0], 1);
    c.observe(2, &[0], 1);
    for _ in 0..10 {
        token(&mut c, &[&[0], &[3], &[1]]);
        token(&mut c, &[&[3], &[2], &[0]]);
    }
    c.observe(0, &[0], 1);
    assert_eq!(guess(&mut c, 1), [3]);
    c.observe(1, &[3], 1);
    assert_eq!(guess(&mut c, 2), [1], "layers have tables of their own");
    c.observe(2, &[1], 1);
    assert_eq!(guess(&mut c, 0), [3], "the first layer from the last one of the token before");
    assert!(guess(&mut c, 9).is_empty());
}

#[test]
fn correlation_learns_from_every_row_of_a_prompt() {
    let mut c = Correlation::new(&[4, 4], 1);
    c.observe(0, &[0, 1, 0, 1], 1);
    // The last layer ran for the last two tokens alone.
    c.observe(1, &[3, 2], 1);
    c.observe(0, &[0], 1);
    assert_eq!(guess(&mut c, 1), [3]);
    let mut c = Correlation::new(&[4, 4], 1);
    c.observe(0, &[0, 1, 0], 1);
    c.observe(1, &[3, 2, 1], 1);
    c.observe(0, &[0], 1);
    assert_eq!(guess(&mut c, 1), [1, 3], "the later one weighs more");
}

#[test]
fn correlation_two_layers_ahead_needs_only_the_layer_two_before() {
    let mut c = Correlation::new(&[4, 4, 4], 2);
    for _ in 0..5 {
        token(&mut c, &[&[0], &[1], &[2]]);
        token(&mut c, &[&[1], &[1], &[3]]);
    }
    c.observe(0, &[0], 1);
    assert_eq!(guess(&mut c, 2), [2]);
    let mut c = Correlation::new(&[4], 3);
    c.observe(0, &[1], 1);
    c.observe(0, &[2], 1);
    assert!(guess(&mut c, 0).is_empty() || guess(&mut c, 0) == [2], "deeper than the model is clamped to it");
}

#[test]
fn old_habits_fade_and_the_table_stays_finite() {
    let mut c = Correlation::new(&[2, 2], 1);
    for to in [0, 1] {
        for _ in 0..3000 {
            token(&mut c, &[&[0], &[to]]);
        }
    }
    c.observe(0, &[0], 1);
    assert_eq!(guess(&mut c, 1), [1, 0]);
    for _ in 0..200_000 {
        token(&mut c, &[&[0], &[1]]);
    }
    let mut out = Vec::new();
    c.predict(1, &mut out);
    assert!(out.iter().all(|s| s.score.is_finite()) && out[0].expert == 1, "{out:?}");
}

#[test]
fn previous_and_frequency_are_what_they_say() {
    let (mut p, mut f) = (PreviousToken::new(), Frequency::new(&[5]));
    for set in [[4, 1], [4, 2], [4, 2], [3, 1]] {
        p.observe(0, &set, 2);
        f.observe(0, &set, 2);
    }
    assert_eq!(guess(&mut p, 0), [1, 3]);
    assert_eq!(guess(&mut f, 0), [4, 1, 2, 3]);
    assert!(guess(&mut p, 1).is_empty() && guess(&mut f, 1).is_empty());
}

#[test]
fn combined_finds_out_whom_to_believe() {
    // Layer 1 follows layer 0 and nothing else; expert 0 of layer 1 is the most frequent overall, and mostly wrong.
    let mut c = Combined::new(&[8, 8], 1);
    for t in 0..2000u32 {
        let e = (t * 5) % 7;
        token(&mut c, &[&[e], &[if e < 2 { 0 } else { e }]]);
    }
    for e in 0..7 {
        c.observe(0, &[e], 1);
        assert_eq!(guess(&mut c, 1)[0], if e < 2 { 0 } else { e });
        c.observe(1, &[if e < 2 { 0 } else { e }], 1);
    }
}

#[test]
fn the_stale_gate_says_what_it_was_told_and_a_table_serves_until_then() {
    let mut g = StaleGate::or(Correlation::new(&[4, 4], 1));
    for _ in 0..5 {
        token(&mut g, &[&[0], &[3]]);
    }
    g.observe(0, &[0], 1);
    g.hint(1, &[]);
    assert_eq!(guess(&mut g, 1), [3], "the table");
    assert_eq!(g.table().map(|t| t.tokens()), Some(6));
    g.hint(1, &[2, 0, 1]);
    assert_eq!(guess(&mut g, 1), [2, 0, 1]);
    assert!(guess(&mut g, 0).is_empty(), "the hint is for another layer");
    assert!(g.table().is_none() && g.takes_hints());
    g.observe(1, &[2], 1);
    assert!(guess(&mut g, 1).is_empty(), "a hint is for one token");
}
