//! Sampling: the host's sampler on the same logits and random numbers.

use candle_core::DType;
use comoe_models::cuda::{SampleArgs, SampleSettings};
use comoe_models::{Sampler, SamplerOptions};

use super::{GPU, Memory, random};

/// The host sampler's random numbers (SplitMix64), in 0..1.
fn uniforms(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..n).map(|_| next()).collect()
}

struct Device {
    args: SampleArgs,
    scratch: Memory,
    token: Memory,
    error: Memory,
    step: Memory,
    _others: [Memory; 4],
}

impl Device {
    fn new(logits: &[f32], dtype: DType, settings: SampleSettings, history: &[u32], steps: usize) -> Self {
        let random: Vec<u8> =
            uniforms(settings.options.seed, steps).iter().flat_map(|u| u.to_le_bytes()).collect();
        let others =
            [Memory::floats(logits, dtype), Memory::of(&random), Memory::words(history), Memory::words(&[3])];
        let (token, error, step) = (Memory::result(4), Memory::zeros(4), Memory::words(&[0]));
        let scratch = Memory::zeros(SampleArgs::SCRATCH_BYTES);
        let args = SampleArgs {
            logits: others[0].address(),
            dtype,
            vocab: logits.len(),
            settings,
            history: others[2].address(),
            history_len: history.len(),
            position: others[3].address(),
            ahead: history.len().max(4) - 3,
            uniforms: others[1].address(),
            uniforms_len: steps,
            step: step.address(),
            token: token.address(),
            scratch: scratch.address(),
            error: error.address(),
        };
        Self { args, scratch, token, error, step, _others: others }
    }

    fn token(&mut self, step: usize) -> (u32, u32) {
        self.step = Memory::words(&[step as u32]);
        self.args.step = self.step.address();
        // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
        unsafe { GPU.kernels.sample(&GPU.stream, &self.args) }.expect("sample");
        (self.token.read_words()[0], self.error.read_words()[0])
    }
}

fn plain(options: SamplerOptions) -> SampleSettings {
    SampleSettings { options, logit_scale: 1.0, logit_cap: None }
}

#[test]
#[ignore = "needs a CUDA device"]
fn tokens_are_those_of_the_host() {
    let o = || SamplerOptions { temperature: 0.8, seed: 5, ..SamplerOptions::default() };
    let options = [
        SamplerOptions { temperature: 0.0, ..o() },
        o(),
        SamplerOptions { top_k: Some(40), ..o() },
        SamplerOptions { top_p: 0.9, ..o() },
        SamplerOptions { top_k: Some(50), top_p: 0.95, min_p: 0.02, ..o() },
        SamplerOptions { min_p: 0.1, temperature: 1.5, ..o() },
        SamplerOptions { top_k: Some(1), ..o() },
        SamplerOptions { top_p: 1e-9, ..o() },
        SamplerOptions { repetition_penalty: 1.3, ..o() },
        SamplerOptions { repetition_penalty: 1.3, repetition_window: Some(2), temperature: 0.0, ..o() },
        SamplerOptions { temperature: 1e-3, top_p: 0.5, ..o() },
    ];
    for (vocab, dtype) in
        [(151_936, DType::F32), (151_936, DType::BF16), (1, DType::F32), (1_300, DType::F16)]
    {
        for (i, options) in options.iter().enumerate() {
            for shape in 0..3 {
                let mut logits = random(vocab, 17 + i as u64, dtype);
                match shape {
                    // Flat; peaked, some masked; all equal.
                    0 => logits.iter_mut().for_each(|l| *l *= 2.0),
                    1 => logits.iter_mut().enumerate().for_each(|(i, l)| {
                        *l = if i % 7 == 3 && i > 3 { f32::NEG_INFINITY } else { l.powi(3) * 24.0 };
                    }),
                    _ => logits.fill(-0.0),
                }
                let logits = super::decode(&super::encode(&logits, dtype), dtype);
                let best = (0..vocab).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).unwrap_or(0);
                let history = [best as u32, 0, best as u32, vocab as u32 - 1, 0, 1 << 30];
                let steps = 24;
                let mut device = Device::new(&logits, dtype, plain(options.clone()), &history, steps);
                let mut host = Sampler::new(options.clone()).expect("options");
                for step in 0..steps {
                    let want = host.sample(&logits, &history).expect("a token");
                    // Every other time the position is far behind the end of the history.
                    device.args.ahead ^= 1 << 20;
                    let have = device.token(step);
                    assert_eq!(have, (want, 0), "{vocab} {dtype:?}, {options:?}, shape {shape}, step {step}");
                }
                assert!(
                    device.scratch.bytes().iter().all(|b| *b == 0),
                    "the scratch is left as it was found"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn broken_logits_are_told_and_the_next_launch_works() {
    let options = SamplerOptions { temperature: 1.0, top_p: 0.9, ..SamplerOptions::default() };
    for vocab in [3usize, 40_000] {
        for (bad, from, error) in [(f32::NAN, 1, 2), (f32::INFINITY, 2, 3), (f32::NEG_INFINITY, 0, 1)] {
            let mut logits = random(vocab, 3, DType::F32);
            logits[from..].fill(bad);
            let mut device = Device::new(&logits, DType::F32, plain(options.clone()), &[0], 1);
            assert_eq!(device.token(0), (0, error));
            assert!(device.scratch.bytes().iter().all(|b| *b == 0));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn scale_and_cap_come_before_all_else() {
    let vocab = 5_000;
    let logits: Vec<f32> = random(vocab, 3, DType::F32).iter().map(|l| l * 60.0).collect();
    let options = SamplerOptions { temperature: 1.0, top_k: Some(500), seed: 2, ..SamplerOptions::default() };
    let settings = SampleSettings { options: options.clone(), logit_scale: 0.5, logit_cap: Some(30.0) };
    let capped: Vec<f32> = logits.iter().map(|l| (l * 0.5 / 30.0).tanh() * 30.0).collect();
    let mut device = Device::new(&logits, DType::F32, settings, &[0], 200);
    let mut host = Sampler::new(options).expect("options");
    // tanh is not the same to the last bit: draws may differ where two tokens meet.
    let same = (0..200).filter(|s| device.token(*s).0 == host.sample(&capped, &[]).expect("a token")).count();
    assert!(same >= 195, "{same} of 200");
}
