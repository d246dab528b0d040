//! The expert FFN on the CPU, straight from a record's bytes.
//!
//! Every dot product of a weight row and a token is computed in one way: weight `c` is decoded to F32 (exact for
//! every format) and multiplied into lane `c % 16` of sixteen F32 accumulators, columns ascending, and the lanes are
//! added in a fixed tree. So the result for one token and expert does not depend on what else is in the batch,
//! on threads or on slots. One token decodes while it multiplies; several tokens decode each row once.

use std::ops::Range;

use rayon::prelude::*;

use super::activation;
use super::decode::{Bf16, Bias, Decode, Int4, Int8, Matrix, Mxfp4, Row, decode_row, tail};
use crate::expert::{Activation, ExpertLayout};
use crate::format::ExpertFormat;
use crate::simd::{LANES, Simd, Vectorised, dispatch};

/// One record and the rows of the input that it is applied to.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    /// The record's bytes.
    pub(super) record: &'a [u8],
    /// The rows of [`Inputs`] that it serves; never empty.
    pub(super) rows: &'a [u32],
}

/// Input vectors, each padded with zeros to a multiple of [`LANES`].
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// `[rows, padded(hidden)]`
    pub(super) data: &'a [f32],
    /// Floats from one row to the next.
    pub(super) stride: usize,
}

impl<'a> Inputs<'a> {
    fn row(self, row: u32) -> &'a [[f32; LANES]] {
        self.data[row as usize * self.stride..][..self.stride].as_chunks().0
    }
}

/// Floats of a vector of `n` after padding.
pub(super) fn padded(n: usize) -> usize {
    n.next_multiple_of(LANES)
}

/// Intermediate results, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    /// Results of a phase as tasks write them: for each call `[matrix rows, tokens]`.
    by_row: Vec<f32>,
    /// `[assignments, padded(intermediate)]`: what goes into `down`.
    between: Vec<f32>,
    /// Row numbers 0, 1, 2, ...
    count: Vec<u32>,
}

impl Scratch {
    /// Gives memory of a large batch back.
    pub(super) fn shrink(&mut self, keep_floats: usize) {
        for v in [&mut self.by_row, &mut self.between] {
            if v.capacity() > keep_floats {
                *v = Vec::new();
            }
        }
    }
}

/// Multiply-adds below which handing work to other threads costs more than it saves (about 100 microseconds of
/// one core).
const PARALLEL_WORK: usize = 1 << 20;
/// Multiply-adds of one task.
const TASK_WORK: usize = 1 << 17;
/// Assignments computed together, to bound the memory of intermediate results.
const BATCH: usize = 1024;
/// Tokens of one call: their inputs should fit the second-level cache.
const MAX_TOKENS: usize = 128;

/// Applies records to inputs: `emit(call, i, y)` gets `y`, `[hidden]`, of the `i`-th row of call `call`. Outputs are
/// emitted in order of calls and rows.
pub(super) fn ffn(
    layout: &ExpertLayout,
    act: Activation,
    inputs: Inputs<'_>,
    calls: &[Call<'_>],
    scratch: &mut Scratch,
    mut emit: impl FnMut(usize, usize, &[f32]),
) {
    // Split calls with many tokens, then group them into batches.
    let pieces = calls.iter().enumerate().flat_map(|(c, call)| {
        let rows = call.rows.chunks(MAX_TOKENS).enumerate();
        rows.map(move |(i, rows)| (c, i * MAX_TOKENS, Call { record: call.record, rows }))
    });
    let mut batch: Vec<(usize, usize, Call<'_>)> = Vec::with_capacity(calls.len());
    let mut held = 0;
    for piece in pieces {
        if held > 0 && held + piece.2.rows.len() > BATCH {
            run_batch(layout, act, inputs, &batch, scratch, &mut emit);
            batch.clear();
            held = 0;
        }
        held += piece.2.rows.len();
        batch.push(piece);
    }
    if held > 0 {
        run_batch(layout, act, inputs, &batch, scratch, &mut emit);
    }
}

fn run_batch(
    layout: &ExpertLayout,
    act: Activation,
    inputs: Inputs<'_>,
    batch: &[(usize, usize, Call<'_>)],
    scratch: &mut Scratch,
    emit: &mut impl FnMut(usize, usize, &[f32]),
) {
    let Scratch { by_row, between, count } = scratch;
    let assignments: usize = batch.iter().map(|b| b.2.rows.len()).sum();
    let (hidden, intermediate) = (layout.down.rows, layout.gate.rows);
    let stride = padded(intermediate);
    by_row.resize(assignments * hidden.max(intermediate), 0.0);
    between.resize(assignments * stride, 0.0);
    if count.len() < assignments {
        count.extend(count.len() as u32..assignments as u32);
    }

    let gate_up = Phase { layout, kind: Kind::GateUp(act), inputs };
    gate_up.run(assignments, batch.iter().map(|b| b.2), by_row);
    let mut at = 0;
    for (_, _, call) in batch {
        let tokens = call.rows.len();
        let h = &by_row[at * intermediate..][..tokens * intermediate];
        for t in 0..tokens {
            let (out, padding) = between[(at + t) * stride..][..stride].split_at_mut(intermediate);
            for (o, h) in out.iter_mut().zip(h.chunks(tokens)) {
                *o = h[t];
            }
            padding.fill(0.0);
        }
        at += tokens;
    }

    let down = Phase { layout, kind: Kind::Down, inputs: Inputs { data: between, stride } };
    let mut first = 0;
    let calls = batch.iter().map(|(_, _, call)| {
        let rows = &count[first..first + call.rows.len()];
        first += rows.len();
        Call { record: call.record, rows }
    });
    down.run(assignments, calls, by_row);
    let mut at = 0;
    let mut y = Vec::new();
    for (c, i, call) in batch {
        let tokens = call.rows.len();
        let out = &by_row[at * hidden..][..tokens * hidden];
        if tokens == 1 {
            emit(*c, *i, out);
        } else {
            for t in 0..tokens {
                y.clear();
                y.extend(out.chunks(tokens).map(|row| row[t]));
                emit(*c, i + t, &y);
            }
        }
        at += tokens;
    }
}

#[derive(Clone, Copy)]
enum Kind {
    GateUp(Activation),
    Down,
}

/// One of the two halves of the FFN.
#[derive(Clone, Copy)]
struct Phase<'a> {
    layout: &'a ExpertLayout,
    kind: Kind,
    inputs: Inputs<'a>,
}

impl<'a> Phase<'a> {
    /// Computes all rows of all calls, `tokens` in sum, into `out`, call after call `[matrix rows, tokens]`.
    fn run(self, tokens: usize, calls: impl Iterator<Item = Call<'a>>, out: &mut [f32]) {
        let (rows, work_per_row) = match self.kind {
            Kind::GateUp(_) => (self.layout.gate.rows, 2 * self.layout.gate.cols),
            Kind::Down => (self.layout.down.rows, self.layout.down.cols),
        };
        let parallel = rows * work_per_row * tokens >= PARALLEL_WORK && rayon::current_num_threads() > 1;
        let mut rest = out;
        let tasks = calls.flat_map(|call| {
            let per_row = (work_per_row * call.rows.len()).max(1);
            // Whole register tiles, so that no task ends in single rows.
            let step = if parallel { (TASK_WORK / per_row).next_multiple_of(4).max(4) } else { rows };
            (0..rows).step_by(step.max(1)).map(move |from| (call, from..(from + step).min(rows)))
        });
        let mut task = |(call, rows): (Call<'a>, Range<usize>)| {
            let (out, after) = std::mem::take(&mut rest).split_at_mut(rows.len() * call.rows.len());
            rest = after;
            Task { phase: self, call, rows, out }
        };
        if parallel {
            let tasks: Vec<_> = tasks.map(task).collect();
            tasks.into_par_iter().with_max_len(1).for_each(Task::run);
        } else {
            tasks.for_each(|t| task(t).run());
        }
    }
}

/// Some rows of one phase of one call.
struct Task<'a, 'o> {
    phase: Phase<'a>,
    call: Call<'a>,
    rows: Range<usize>,
    /// `[rows, tokens]`
    out: &'o mut [f32],
}

impl Task<'_, '_> {
    fn run(self) {
        match self.phase.layout.format {
            ExpertFormat::Bf16 => dispatch(Decoding::<Bf16>(self, Default::default())),
            ExpertFormat::Int8 { .. } => dispatch(Decoding::<Int8>(self, Default::default())),
            ExpertFormat::Int4 { .. } => dispatch(Decoding::<Int4>(self, Default::default())),
            ExpertFormat::Mxfp4 => dispatch(Decoding::<Mxfp4>(self, Default::default())),
        }
    }
}

struct Decoding<'a, 'o, D>(Task<'a, 'o>, std::marker::PhantomData<D>);

impl<D: Decode> Vectorised for Decoding<'_, '_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Task { phase, call, rows, out } = self.0;
        let l = phase.layout;
        match (phase.kind, call.rows) {
            (Kind::GateUp(act), &[row]) => {
                let (gate, up) = (Matrix::new(l, &l.gate, call.record), Matrix::new(l, &l.up, call.record));
                let bias = l.bias.map(|b| (Bias::new(call.record, b.gate), Bias::new(call.record, b.up)));
                one_token_gate_up::<D, S>(simd, &gate, &up, bias, act, phase.inputs.row(row), rows, out);
            }
            (Kind::Down, &[row]) => {
                let down = Matrix::new(l, &l.down, call.record);
                one_token_down::<D, S>(simd, &down, phase.inputs.row(row), rows.clone(), out);
                if let Some(b) = l.bias {
                    let bias = Bias::new(call.record, b.down);
                    rows.zip(out).for_each(|(r, y)| *y += bias.at(r));
                }
            }
            (Kind::GateUp(act), tokens) => {
                let (gate, up) = (Matrix::new(l, &l.gate, call.record), Matrix::new(l, &l.up, call.record));
                let mut u = vec![0.0; out.len()];
                many_tokens::<D, S>(simd, &gate, phase.inputs, tokens, rows.clone(), out);
                many_tokens::<D, S>(simd, &up, phase.inputs, tokens, rows.clone(), &mut u);
                let bias = l.bias.map(|b| (Bias::new(call.record, b.gate), Bias::new(call.record, b.up)));
                let n = tokens.len();
                for ((r, g), u) in rows.zip(out.chunks_mut(n)).zip(u.chunks(n)) {
                    for (g, u) in g.iter_mut().zip(u) {
                        *g = gated(act, bias, r, *g, *u);
                    }
                }
            }
            (Kind::Down, tokens) => {
                let down = Matrix::new(l, &l.down, call.record);
                many_tokens::<D, S>(simd, &down, phase.inputs, tokens, rows.clone(), out);
                if let Some(b) = l.bias {
                    let bias = Bias::new(call.record, b.down);
                    for (r, y) in rows.zip(out.chunks_mut(tokens.len())) {
                        y.iter_mut().for_each(|y| *y += bias.at(r));
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn gated(act: Activation, bias: Option<(Bias<'_>, Bias<'_>)>, row: usize, gate: f32, up: f32) -> f32 {
    match bias {
        Some((g, u)) => activation::apply(act, gate + g.at(row), up + u.at(row)),
        None => activation::apply(act, gate, up),
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one inlined loop with one caller")]
fn one_token_gate_up<D: Decode, S: Simd>(
    simd: S,
    gate: &Matrix<'_>,
    up: &Matrix<'_>,
    bias: Option<(Bias<'_>, Bias<'_>)>,
    act: Activation,
    x: &[[f32; LANES]],
    rows: Range<usize>,
    out: &mut [f32],
) {
    let (pairs, last) = out.as_chunks_mut::<2>();
    let mut r = rows.start;
    for pair in pairs {
        let [g0, u0, g1, u1] =
            dot::<D, S, 4>(simd, gate, [gate.row(r), up.row(r), gate.row(r + 1), up.row(r + 1)], x);
        *pair = [gated(act, bias, r, g0, u0), gated(act, bias, r + 1, g1, u1)];
        r += 2;
    }
    for y in last {
        let [g, u] = dot::<D, S, 2>(simd, gate, [gate.row(r), up.row(r)], x);
        *y = gated(act, bias, r, g, u);
        r += 1;
    }
}

#[inline(always)]
fn one_token_down<D: Decode, S: Simd>(
    simd: S,
    m: &Matrix<'_>,
    x: &[[f32; LANES]],
    rows: Range<usize>,
    out: &mut [f32],
) {
    let (fours, last) = out.as_chunks_mut::<4>();
    let mut r = rows.start;
    for four in fours {
        *four = dot::<D, S, 4>(simd, m, [m.row(r), m.row(r + 1), m.row(r + 2), m.row(r + 3)], x);
        r += 4;
    }
    for y in last {
        [*y] = dot::<D, S, 1>(simd, m, [m.row(r)], x);
        r += 1;
    }
}

/// `out[r, t] = row r . x[tokens[t]]`
#[inline(always)]
fn many_tokens<D: Decode, S: Simd>(
    simd: S,
    m: &Matrix<'_>,
    inputs: Inputs<'_>,
    tokens: &[u32],
    rows: Range<usize>,
    out: &mut [f32],
) {
    if S::WIDE {
        tiles::<D, S, 4, 4>(simd, m, inputs, tokens, rows, out);
    } else {
        tiles::<D, S, 2, 2>(simd, m, inputs, tokens, rows, out);
    }
}

#[inline(always)]
fn tiles<D: Decode, S: Simd, const R: usize, const T: usize>(
    simd: S,
    m: &Matrix<'_>,
    inputs: Inputs<'_>,
    tokens: &[u32],
    rows: Range<usize>,
    out: &mut [f32],
) {
    let n = tokens.len();
    let blocks = m.cols.div_ceil(LANES);
    let mut decoded = vec![[0.0; LANES]; R * blocks];
    for (from, out) in rows.clone().step_by(R).zip(out.chunks_mut(R * n)) {
        let count = R.min(rows.end - from);
        for r in 0..count {
            decode_row::<D, S>(simd, m, m.row(from + r), &mut decoded[r * blocks..][..blocks]);
        }
        // Rows that are not there repeat the first one; their results are dropped.
        let w: [&[[f32; LANES]]; R] =
            std::array::from_fn(|r| &decoded[if r < count { r } else { 0 } * blocks..][..blocks]);
        let (groups, last) = tokens.as_chunks::<T>();
        for (g, group) in groups.iter().enumerate() {
            let y = tile::<S, R, T>(simd, w, group.map(|t| &inputs.row(t)[..blocks]));
            for r in 0..count {
                out[r * n + g * T..][..T].copy_from_slice(&y[r]);
            }
        }
        for (t, token) in (n - last.len()..).zip(last) {
            let y = tile::<S, R, 1>(simd, w, [&inputs.row(*token)[..blocks]]);
            for r in 0..count {
                out[r * n + t] = y[r][0];
            }
        }
    }
}

/// The dot products of `R` decoded rows and `T` tokens, in registers.
#[inline(always)]
fn tile<S: Simd, const R: usize, const T: usize>(
    simd: S,
    w: [&[[f32; LANES]]; R],
    x: [&[[f32; LANES]]; T],
) -> [[f32; T]; R] {
    let mut acc = [[simd.splat(0.0); T]; R];
    let blocks = w[0].len();
    let (w, x) = (w.map(|w| &w[..blocks]), x.map(|x| &x[..blocks]));
    for b in 0..blocks {
        let mut xs = [simd.splat(0.0); T];
        for t in 0..T {
            xs[t] = simd.load(&x[t][b]);
        }
        for r in 0..R {
            let w = simd.load(&w[r][b]);
            for t in 0..T {
                acc[r][t] = simd.fma(w, xs[t], acc[r][t]);
            }
        }
    }
    let mut y = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            y[r][t] = simd.sum(acc[r][t]);
        }
    }
    y
}

/// The dot products of `R` rows and one token, decoding on the way.
#[inline(always)]
fn dot<D: Decode, S: Simd, const R: usize>(
    simd: S,
    m: &Matrix<'_>,
    rows: [Row<'_>; R],
    x: &[[f32; LANES]],
) -> [f32; R] {
    let full = m.cols / LANES;
    let mut acc = [simd.splat(0.0); R];
    let w: [&[D::Block]; R] = rows.map(|row| &D::blocks(row.weights)[..full]);
    let x_full = &x[..full];
    let mut from = 0;
    let mut group = 0;
    while from < full {
        let to = (from + m.group_blocks).min(full);
        let scales = rows.map(|row| D::scale(simd, row.scales, group));
        for b in from..to {
            let x = simd.load(&x_full[b]);
            for r in 0..R {
                acc[r] = simd.fma(D::decode(simd, &w[r][b], scales[r]), x, acc[r]);
            }
        }
        from = to;
        group += 1;
    }
    if !m.cols.is_multiple_of(LANES) {
        let x = simd.load(&x[full]);
        for r in 0..R {
            acc[r] = simd.fma(tail::<D, S>(simd, m, rows[r]), x, acc[r]);
        }
    }
    let mut y = [0.0; R];
    for r in 0..R {
        y[r] = simd.sum(acc[r]);
    }
    y
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
pub(crate) mod tests;
