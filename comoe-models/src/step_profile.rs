//! What a replayed step spends its time on.

/// One part of a step, or several alike.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PartTime {
    /// What it is.
    pub what: String,
    /// How many.
    pub times: usize,
    /// Time of all of them in a step, us.
    pub us: f64,
    /// Bytes of dense weights that all of them read.
    pub bytes: u64,
}

/// Where the time of replayed steps goes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Profile {
    /// One by one, in order; each the mean of the steps.
    pub parts: Vec<PartTime>,
    /// When each part of each step began, and behind them when the step was over: ns on the GPU's own clock
    /// ([`SpanZero`](comoe_core::backend::SpanZero)).
    pub steps: Vec<Vec<u64>>,
}
