//! What kernels took down (kernels/spans.cuh), read.

use std::collections::HashMap;

use crate::backend::{DeviceSpan, Queue};
use crate::store::{Directory, RecordIndex};

/// `sizeof(Span)`.
pub(super) const SPAN_BYTES: usize = 32;

/// `struct Span`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Logged {
    begin: u64,
    end: u64,
    record: u32,
    bytes: u32,
    staged: u32,
    request: u32,
}

impl Logged {
    pub(super) fn read(bytes: &[u8; SPAN_BYTES]) -> Self {
        let words = bytes.as_chunks().0;
        let word = |i: usize| u32::from_le_bytes(words[i]);
        let long = |i: usize| u64::from(word(i)) | u64::from(word(i + 1)) << 32;
        let [begin, end] = [long(0), long(2)];
        Self { begin, end, record: word(4), bytes: word(5), staged: word(6), request: word(7) }
    }

    /// As it is told, where the moment `ns` of the kernels' clock is 0 us.
    pub(super) fn told(&self, directory: &Directory, ns: u64) -> DeviceSpan {
        let id = directory.id(RecordIndex(self.record));
        let what = match (self.request, self.staged, self.bytes) {
            (0, 0, _) => id.to_string(),
            (0, _, 0) => format!("{id}, brought ahead"),
            (0, staged, rest) => {
                let percent = 100 * u64::from(staged) / (u64::from(staged) + u64::from(rest));
                format!("{id}, {percent} % of it brought ahead")
            }
            _ => format!("guessed of layer {}", id.layer),
        };
        // Of numbers of 60 bits, so taken before it becomes a float.
        let us = |at: u64| at.wrapping_sub(ns) as i64 as f64 / 1e3;
        DeviceSpan {
            queue: if self.request == 0 { Queue::Demand } else { Queue::Prefetch },
            what,
            begin: us(self.begin),
            end: us(self.end),
            bytes: self.bytes.into(),
        }
    }
}

/// One span for each read and each request: of a request each block has written its own, and steps that came to nothing leave
/// some that nobody began or ended.
pub(super) fn whole(logged: impl IntoIterator<Item = Logged>) -> Vec<Logged> {
    let mut whole: Vec<Logged> = Vec::new();
    let mut requests = HashMap::new();
    for span in logged.into_iter().filter(|s| s.begin <= s.end) {
        if span.request != 0 {
            let at = *requests.entry((span.record, span.request)).or_insert(whole.len());
            if let Some(request) = whole.get_mut(at) {
                request.begin = request.begin.min(span.begin);
                request.end = request.end.max(span.end);
                request.bytes += span.bytes;
                continue;
            }
        }
        whole.push(span);
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(begin: u64, end: u64, record: u32, bytes: u32, request: u32) -> Logged {
        Logged { begin, end, record, bytes, staged: 0, request }
    }

    #[test]
    fn an_entry_is_read_as_kernels_write_it() {
        let numbers: [u32; 8] = [5, 1, 9, 1, 17, 640, 64, 3];
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let read = Logged::read(bytes.as_slice().try_into().unwrap());
        let (begin, end) = ((1 << 32) + 5, (1 << 32) + 9);
        assert_eq!(read, Logged { begin, end, record: 17, bytes: 640, staged: 64, request: 3 });
    }

    #[test]
    fn blocks_of_a_request_are_one_and_reads_stay_their_own() {
        let logged = [
            span(101, 190, 3, 40, 5),
            span(100, 180, 3, 48, 5),
            // Nobody read it, or not to its end.
            span(u64::MAX, 0, 9, 640, 0),
            span(150, 0, 9, 640, 0),
            // Two tokens read the same record.
            span(120, 180, 3, 640, 0),
            span(180, 260, 3, 640, 0),
            // Another request for the same layer, and one for another layer.
            span(201, 220, 3, 40, 6),
            span(102, 150, 4, 40, 5),
            // A block that came late.
            span(195, 200, 3, 8, 5),
        ];
        let want = [
            span(100, 200, 3, 96, 5),
            span(120, 180, 3, 640, 0),
            span(180, 260, 3, 640, 0),
            span(201, 220, 3, 40, 6),
            span(102, 150, 4, 40, 5),
        ];
        assert_eq!(whole(logged), want);
    }

    #[test]
    fn spans_say_what_came_over_the_link_and_since_when() {
        let directory = Directory::new([(3, 8, 1024), (5, 4, 1024)]).unwrap();
        let read = |staged, bytes| Logged { staged, ..span(1 << 60, (1 << 60) + 1500, 9, bytes, 0) };
        let told = |s: Logged| s.told(&directory, (1 << 60) - 250);
        let all = told(read(0, 1024));
        assert_eq!((all.queue, all.what.as_str(), all.bytes), (Queue::Demand, "layer 5 expert 1", 1024));
        assert_eq!((all.begin, all.end), (0.25, 1.75));
        assert_eq!(told(read(1024, 0)).what, "layer 5 expert 1, brought ahead");
        assert_eq!(told(read(256, 768)).what, "layer 5 expert 1, 25 % of it brought ahead");
        let ahead = told(span(1 << 60, 1 << 60, 2, 64, 1));
        assert_eq!((ahead.queue, ahead.what.as_str()), (Queue::Prefetch, "guessed of layer 3"));
        // Before the moment from which times count.
        assert_eq!(span(4_000, 5_000, 0, 64, 0).told(&directory, 6_000).begin, -2.0);
    }
}
