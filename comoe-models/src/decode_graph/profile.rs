//! Where the time of replayed steps goes.

use comoe_core::TokenOutcome;

use super::DeviceSteps;
use super::capture::doing;
use crate::blocks::fused::Fused;
use crate::blocks::kv_cache::KvCache;
use crate::error::Result;
use crate::step_profile::{PartTime, Profile};

/// Ends of parts whose time is taken, in one step.
const MOST_MARKS: usize = 1 << 14;

impl DeviceSteps<'_> {
    /// Where the time of a replayed step goes: `n` more steps, from a graph of their own that takes the time behind each
    /// part. That takes time itself, and keeps kernels from being set up further ahead, so the whole is slower than without.
    /// `None` where steps are not replayed, or none has reached as far as these will: see [`Self::note`].
    ///
    /// # Errors
    /// As [`Self::next`], and [`Error::ContextExceeded`](crate::Error::ContextExceeded) for more than the cache has room for.
    pub fn profile(&mut self, kv: &mut KvCache, n: usize) -> Result<Option<Profile>> {
        self.settle();
        kv.reserve(n)?;
        let Some(top_k) = self.decoder.top_k() else { return Ok(None) };
        let reach = Fused::reach(kv.len() + n, kv.capacity());
        let place = kv.place(kv.len())?;
        let Some(stamps) = self.decoder.experts().stamps(MOST_MARKS)? else { return Ok(None) };
        if let Some(fused) = self.decoder.fused() {
            fused.begin_marks(stamps);
        }
        // Not one of those that are kept.
        let kept = std::mem::take(&mut self.graphs);
        let recorded = self.record(kv, reach, &place, (top_k, self.next_asks()));
        let marks = self.decoder.fused().and_then(|fused| fused.take_marks());
        let graph = std::mem::replace(&mut self.graphs, kept).pop_back();
        let (true, Some(mut graph), Some(marks)) = (recorded?, graph, marks) else {
            let unknown = || format!("no step has run yet that sees {reach} positions, as these would");
            self.note.get_or_insert_with(unknown);
            return Ok(None);
        };
        let mut parts: Vec<PartTime> = marks
            .list
            .iter()
            .skip(1)
            .map(|m| PartTime { what: m.what.clone(), times: 1, us: 0.0, bytes: m.bytes as u64 })
            .collect();
        let mut steps = Vec::new();
        for _ in 0..n {
            self.draw()?;
            let mut token = self.decoder.experts().begin_token(1, top_k)?;
            graph.graph.launch().map_err(doing("replaying a step"))?;
            if token.end()? == TokenOutcome::Replay {
                // Its time would be the host's. What the run said about its NaNs is to be forgotten.
                if let Some(fused) = self.decoder.fused() {
                    fused.forget_errors()?;
                }
                self.note = Some("a step missed an expert that only the host can bring".to_owned());
                return Ok(None);
            }
            drop(token);
            kv.advance(1);
            kv.place_moved();
            self.count(graph.logits.clone())?;
            self.wait(kv)?;
            let times = marks.stamps.read(marks.list.len())?;
            for (pair, part) in times.windows(2).zip(&mut parts) {
                part.us += pair[1].saturating_sub(pair[0]) as f64 / 1e3 / n as f64;
            }
            steps.push(times);
        }
        Ok(Some(Profile { parts, steps }))
    }
}
