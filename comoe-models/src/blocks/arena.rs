//! Buffers for the results of fused steps, made once and used again, so that a step allocates nothing.

use std::cell::{Cell, RefCell};

use candle_core::{DType, Device, Result, Shape, Tensor};

/// Two sets of buffers, used in turn by a step's layers. A result is used in the layer that made it and in the next,
/// never later, and kernels on one stream run in order: when a set's turn comes again, nobody needs what is in it.
///
/// Nothing is freed before the arena is, because graphs hold the addresses.
pub(super) struct Arena {
    device: Device,
    /// The n-th result of a layer lies in one of the n-th buffers.
    sets: [RefCell<Vec<Vec<Tensor>>>; 2],
    turn: Cell<usize>,
    next: Cell<usize>,
}

impl Arena {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), sets: Default::default(), turn: Cell::new(0), next: Cell::new(0) }
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> u64 {
        let sets = self.sets.iter().map(RefCell::borrow);
        let bytes = |t: &Tensor| (t.elem_count() * t.dtype().size_in_bytes()) as u64;
        sets.map(|set| set.iter().flatten().map(bytes).sum::<u64>()).sum()
    }

    /// The other set's turn.
    pub(super) fn turn(&self) {
        self.turn.set(1 - self.turn.get());
        self.next.set(0);
    }

    /// Room for a result, contiguous; what is in it is undefined. `most` is how many elements it can have in another
    /// step of the same model.
    pub(super) fn take(&self, shape: impl Into<Shape>, most: usize, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let elements = shape.elem_count();
        let n = self.next.replace(self.next.get() + 1);
        let mut set = self.sets[self.turn.get()].borrow_mut();
        if set.len() <= n {
            set.resize_with(n + 1, Vec::new);
        }
        let fits = |t: &&Tensor| t.dtype() == dtype && t.elem_count() >= elements;
        let buffer = match set[n].iter().find(fits) {
            Some(buffer) => buffer.clone(),
            None => {
                // SAFETY: whoever takes it has a kernel write all of it before anything reads it.
                let buffer = unsafe { Tensor::empty(most.max(elements), dtype, &self.device) }?;
                set[n].push(buffer.clone());
                buffer
            }
        };
        buffer.narrow(0, 0, elements)?.reshape(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(t: &Tensor, value: f32) {
        t.slice_set(&Tensor::full(value, t.dims(), &Device::Cpu).unwrap(), 0, 0).unwrap();
    }

    fn holds(t: &Tensor, value: f32) -> bool {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|v| *v == value)
    }

    #[test]
    fn a_buffer_comes_back_after_two_layers() {
        let arena = Arena::new(&Device::Cpu);
        let take = |shape: (usize, usize)| arena.take(shape, 0, DType::F32).unwrap();
        let (first, second) = (take((2, 3)), take((2, 3)));
        arena.turn();
        let other = take((2, 3));
        for (t, value) in [(&first, 1.0), (&second, 2.0), (&other, 3.0)] {
            fill(t, value);
        }
        assert!(holds(&first, 1.0) && holds(&second, 2.0) && holds(&other, 3.0), "all are apart");
        arena.turn();
        let again = take((1, 5));
        fill(&again, 4.0);
        assert!(holds(&first.flatten_all().unwrap().narrow(0, 0, 5).unwrap(), 4.0), "the first's place");
        // What is too small stays, for whoever still has it.
        let larger = take((4, 4));
        fill(&larger, 5.0);
        assert!(holds(&second, 2.0));
        arena.turn();
        arena.turn();
        take((1, 1));
        fill(&take((2, 3)), 6.0);
        assert!(holds(&second, 6.0) && holds(&larger, 5.0));
    }

    #[test]
    fn a_buffer_is_as_large_as_it_may_have_to_be() {
        let arena = Arena::new(&Device::Cpu);
        let one = arena.take((1, 3), 12, DType::F32).unwrap();
        assert_eq!(arena.bytes(), 4 * 12);
        arena.turn();
        arena.turn();
        fill(&arena.take((4, 3), 12, DType::F32).unwrap(), 7.0);
        assert!(holds(&one, 7.0));
    }
}
