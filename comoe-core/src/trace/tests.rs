//! Traces written and read back, and files that are no good.

use proptest::prelude::*;

use super::testing::{info, made};
use super::*;
use crate::error::Error;

const WEIGHTS: Contents = Contents { weights: true, guesses: false };

fn saved(trace: &Trace) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().unwrap();
    trace.save(file.path()).unwrap();
    std::fs::read(file.path()).unwrap()
}

fn open(bytes: &[u8]) -> Result<Trace> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Trace::open(file.path())
}

fn token(layers: usize, experts: u32) -> impl Strategy<Value = (u32, bool, Vec<Vec<u32>>)> {
    let set = prop::sample::subsequence((0..experts).collect::<Vec<_>>(), 1..4).prop_shuffle();
    (0u32..3, any::<bool>(), prop::collection::vec(set, layers))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_saved_is_read(tokens in prop::collection::vec(token(3, 300), 1..40)) {
        let trace = made(&info(&[(0, 300), (2, 300), (3, 300)], 3), &tokens);
        prop_assert_eq!(open(&saved(&trace)).unwrap(), trace);
    }

    #[test]
    fn damage_is_found_wherever_it_is(at in 0usize..1000, flip in 1u8..=255) {
        let tokens: Vec<_> = (0..20).map(|t| (0, t > 3, vec![vec![t % 8, 8 + t % 5], vec![t % 7]])).collect();
        let mut bytes = saved(&made(&info(&[(0, 16), (1, 16)], 2), &tokens));
        let at = at % bytes.len();
        let whole = open(&bytes).unwrap();
        prop_assert!(open(&bytes[..at]).is_err(), "cut at {}", at);
        bytes[at] ^= flip;
        if let Ok(read) = open(&bytes) {
            // The header names the model, its top-k and sizes; choices are guarded by checksums.
            prop_assert_eq!(read.tokens(), whole.tokens());
            prop_assert_eq!(&read.experts, &whole.experts);
        }
    }
}

#[test]
fn a_run_is_recorded_chunk_by_chunk() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut recorder = Recorder::create(file.path(), info(&[(0, 8), (3, 8)], 2), WEIGHTS).unwrap();
    let step = |recorder: &mut Recorder, layer, choices: &[u32], weights: &[f32]| {
        recorder.step(&Routed { layer, top_k: 2, choices, weights: Some(weights), guess: &[] });
    };
    recorder.begin(0, Phase::Prompt);
    step(&mut recorder, 0, &[1, 2, 3, 3], &[0.5, 0.5, 0.25, 0.5]);
    // The last layer ran for the last token alone.
    step(&mut recorder, 1, &[7, 4], &[0.75, 0.25]);
    recorder.begin(0, Phase::Decode);
    for t in 0..2 {
        step(&mut recorder, 0, &[t, 6], &[0.5, 0.5]);
        step(&mut recorder, 1, &[5, t], &[0.5, 0.5]);
    }
    assert_eq!(recorder.finish().unwrap(), 4);
    let trace = Trace::open(file.path()).unwrap();
    assert_eq!(trace.tokens().iter().filter(|t| t.phase == Phase::Prompt).count(), 2);
    let sets: Vec<_> = (0..4).map(|t| (trace.chosen(t, 0).to_vec(), trace.chosen(t, 1).to_vec())).collect();
    assert_eq!(sets[0], (vec![1, 2], vec![]));
    assert_eq!(sets[1], (vec![3], vec![7, 4]), "an expert named twice is one member");
    assert_eq!(trace.weights(1, 0), Some(&[0.75f32][..]));
    assert_eq!(sets[2..], [(vec![0, 6], vec![5, 0]), (vec![1, 6], vec![5, 1])]);
}

#[test]
fn guesses_are_kept_with_the_layer_they_are_for_and_files_without_stay_as_they_were() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let contents = Contents { weights: false, guesses: true };
    let mut recorder = Recorder::create(file.path(), info(&[(0, 8), (3, 400)], 2), contents).unwrap();
    assert!(recorder.wants_guesses());
    recorder.begin(0, Phase::Prompt);
    let mut step = |layer, choices: &[u32], guess: &[u32]| {
        recorder.step(&Routed { layer, top_k: 2, choices, weights: None, guess });
    };
    step(0, &[1, 2, 3, 4], &[]);
    step(1, &[7, 399], &[]);
    step(0, &[1, 2], &[399, 5, 300]);
    step(1, &[300, 6], &[]);
    recorder.finish().unwrap();
    let bytes = std::fs::read(file.path()).unwrap();
    assert_eq!(bytes[8], 2);
    let trace = open(&bytes).unwrap();
    assert_eq!((trace.tokens().len(), trace.has_guesses()), (3, true));
    assert_eq!((trace.guesses(2, 1), trace.chosen(2, 1)), (&[399u32, 5, 300][..], &[300u32, 6][..]));
    assert!((0..2).all(|t| (0..2).all(|l| trace.guesses(t, l).is_empty())), "{trace:?}");
    assert_eq!(open(&saved(&trace)).unwrap(), trace);
    assert_eq!(trace.part(1..3).guesses(1, 1), [399, 5, 300]);

    let plain = made(&info(&[(0, 4)], 1), &[(0, true, vec![vec![1]])]);
    assert_eq!((saved(&plain)[8], plain.has_guesses()), (1, false), "older builds read it");
}

#[test]
fn files_of_another_kind_version_or_length_are_refused_with_their_place() {
    let message = |bytes: &[u8]| open(bytes).unwrap_err().to_string();
    assert!(message(b"").contains("empty"));
    assert!(message(b"hello\n").contains("line 1"));
    assert!(message(&[0xff, 0xfe, 0]).contains("line 1"));

    let good = saved(&made(&info(&[(0, 4)], 1), &[(0, true, vec![vec![1]])]));
    let mut other = good.clone();
    other[8] = 9;
    assert!(matches!(open(&other).unwrap_err(), Error::TraceVersion { known: VERSION, .. }));
    let cut = message(&good[..good.len() - 1]);
    assert!(cut.contains("truncated") && cut.contains("byte "), "{cut}");

    let none = TraceWriter::new(Vec::new(), info(&[(0, 4)], 1), Contents::default()).unwrap();
    drop(none);
    let mut empty = Vec::new();
    TraceWriter::new(&mut empty, info(&[(0, 4)], 1), Contents::default()).unwrap().finish().unwrap();
    assert!(open(&empty).unwrap_err().to_string().contains("no tokens"));
}

/// A turn that failed leaves the file as if it had not been, whether some of it was written already or not; a recording
/// of nothing, or that is not finished, leaves no file, and the old one if there is one.
#[test]
fn a_turn_that_fails_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let record = |name: &str, failed: &[usize]| {
        let path = folder.path().join(name);
        let mut recorder = Recorder::create(&path, info(&[(0, 8)], 2), Contents::default()).unwrap();
        let mut turn = 0;
        let mut say = |tokens: usize, fails: bool| {
            recorder.begin(turn, Phase::Prompt);
            for t in 0..tokens as u32 {
                recorder.step(&Routed {
                    layer: 0,
                    top_k: 2,
                    choices: &[t % 8, turn],
                    weights: None,
                    guess: &[],
                });
            }
            if fails {
                recorder.drop_turn();
            } else {
                turn += 1;
            }
        };
        say(3, false);
        failed.iter().for_each(|&tokens| say(tokens, true));
        say(2, false);
        failed.iter().for_each(|&tokens| say(tokens, true));
        assert_eq!(recorder.finish().unwrap(), 5);
        (std::fs::read(&path).unwrap(), Trace::open(&path).unwrap())
    };
    let (bytes, trace) = record("calm", &[]);
    assert_eq!(trace.tokens().len(), 5);
    // The longest fill several blocks.
    for failed in [&[1][..], &[0], &[70_000], &[70_000, 1, 70_000]] {
        assert!(record("failed", failed).0 == bytes, "{failed:?}");
    }
    let path = folder.path().join("calm");
    for finish in [true, false] {
        let recorder = Recorder::create(&path, info(&[(0, 8)], 2), Contents::default()).unwrap();
        recorder.begin(0, Phase::Prompt);
        recorder.drop_turn();
        if finish {
            assert_eq!(recorder.finish().unwrap(), 0);
        }
    }
    assert_eq!(Trace::open(&path).unwrap(), trace);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
}

#[test]
fn experts_out_of_range_and_missing_layers_are_found() {
    let write = |layers: &[(usize, &[u32])]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let info = info(&[(0, 4), (5, 4), (6, 4)], 1);
        let mut recorder = Recorder::create(file.path(), info, Contents::default()).unwrap();
        recorder.begin(0, Phase::Decode);
        for &(layer, choices) in layers {
            recorder.step(&Routed { layer, top_k: 1, choices, weights: None, guess: &[] });
        }
        recorder.finish().unwrap();
        Trace::open(file.path()).map(drop).unwrap_err().to_string()
    };
    let range = write(&[(0, &[1]), (1, &[4]), (2, &[0])]);
    assert!(range.contains("expert 4 of layer 5") && range.contains("byte "), "{range}");
    let missing = write(&[(0, &[1]), (2, &[0])]);
    assert!(missing.contains("no choice in layer 5"), "{missing}");
}

#[test]
fn a_trace_of_another_model_is_named() {
    let trace = info(&[(0, 4), (1, 4)], 1);
    let check =
        |layers: &[(usize, usize)]| trace.check_model(&info(layers, 1).directory).map_err(|e| e.to_string());
    assert_eq!(check(&[(0, 4), (1, 4)]), Ok(()));
    assert!(check(&[(0, 4)]).unwrap_err().contains("it has 1 layers with experts, the trace has 2"));
    assert!(check(&[(0, 4), (1, 8)]).unwrap_err().contains("layer 1 has 8 experts"));
}

const CSV: &str = "# route_trace v1
# model=/somewhere/tiny.gguf arch=x n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=1
# layer=1 expert_bytes=200 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,1,0.6,0,100
0,0,0,0,1,2,0.4,0,100
0,0,1,0,1,2,0.4,0,0
0,0,1,0,0,3,0.6,0,100
0,0,1,1,0,0,1.0,0,200
0,1,2,1,0,0,1.0,1,0
0,1,2,0,0,3,1.0,1,0
";

#[test]
fn a_csv_is_sorted_whatever_its_order() {
    let trace = open(CSV.as_bytes()).unwrap();
    assert_eq!((trace.info().model.as_str(), trace.info().top_k, trace.layers()), ("tiny.gguf", 2, 2));
    assert_eq!(trace.tokens().len(), 3);
    assert_eq!(trace.chosen(0, 0), [1, 2]);
    assert!(trace.chosen(0, 1).is_empty(), "the last layer may be missing for a prompt token");
    assert_eq!((trace.chosen(1, 0), trace.weights(1, 0)), (&[3u32, 2][..], Some(&[0.6f32, 0.4][..])));
    assert_eq!((trace.chosen(2, 0), trace.chosen(2, 1)), (&[3u32][..], &[0u32][..]));
    assert_eq!(trace.info().directory.layers()[1].record_bytes, 200);
}

#[test]
fn a_bad_csv_names_the_line() {
    let message =
        |from: &str, to: &str| open(CSV.replace(from, to).as_bytes()).map(drop).unwrap_err().to_string();
    for (from, to, line, what) in [
        ("route_trace v1", "route_trace v2", "", "version v2"),
        ("n_expert=4", "n_expert=3", "line 9", "expert 3 of a layer with 3"),
        ("0,0,1,1,0,0,1.0,0,200", "0,0,1,7,0,0,1.0,0,200", "line 10", "layer 7"),
        ("0,1,2,0,0,3,1.0,1,0\n", "0,1,2,0,", "line 12", "expected 9 fields, found 5"),
        ("0,1,2,1,0,0,1.0,1,0\n", "", "line 11", "no row for layer 1"),
        ("# layer=1 expert_bytes=200 dense_bytes=1\n", "", "line 4", "no line gives layer=1"),
        ("0,0,0,0,0,1,0.6", "0,0,0,0,0,x,0.6", "line 6", "expert is \"x\""),
        ("0,1,2,0", "0,7,2,0", "line 12", "phase"),
    ] {
        let e = message(from, to);
        assert!(e.contains(line) && e.contains(what), "{e}");
    }
    let head: String = CSV.lines().take(5).map(|l| format!("{l}\n")).collect();
    assert!(open(head.as_bytes()).unwrap_err().to_string().contains("no rows"));
}

#[test]
fn the_recording_runs_own_cache_is_told_from_another() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), CSV).unwrap();
    let mut rows = csv::RouteRows::open(file.path()).unwrap();
    assert_eq!(rows.residency_mismatches(500), 0);
    assert!(rows.residency_mismatches(100) > 0, "a smaller cache would have missed more");
    rows.rows[2].bytes_loaded = 100;
    assert_eq!(rows.residency_mismatches(500), 1);
}

#[test]
fn a_summary_counts_what_can_be_counted_by_hand() {
    let sets = [[0, 1], [1, 2], [0, 1], [3, 1]];
    let tokens: Vec<_> = sets.iter().map(|s| (0, true, vec![s.to_vec()])).collect();
    let summary = made(&info(&[(4, 8)], 2), &tokens).summary();
    let l = &summary.layers[0];
    assert_eq!((l.layer, l.used, &l.counts[..4]), (4, 4, &[2, 4, 1, 1][..]));
    // Shares 1/4, 1/2, 1/8, 1/8: 0.5 + 0.5 + 0.375 + 0.375 bits.
    assert!((l.entropy - 1.75).abs() < 1e-12, "{}", l.entropy);
    assert_eq!(l.overlap, Some(3.0 / 6.0));
    // Reuses: 1 at distance 0; 0 after 1 and 2; 1 after 0 and 2 (2 was used since); 1 after 3.
    assert_eq!((l.reuse_median, l.reuse_p90), (Some(2), Some(2)));
    assert_eq!((summary.turns, summary.prompt_tokens, summary.decode_tokens), (1, 0, 4));
}
