//! What packing lost.

/// Sums over weights that were packed: of the squared differences, and of the squares.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Loss {
    /// Sum of squared differences between the weights and what their record decodes to.
    pub(crate) error: f64,
    /// Sum of squares of the weights.
    pub(crate) norm: f64,
}

impl Loss {
    /// Root mean square of the differences, relative to that of the weights.
    pub(crate) fn relative(&self) -> f64 {
        if self.norm == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() }
    }
}

impl std::ops::Add for Loss {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { error: self.error + other.error, norm: self.norm + other.norm }
    }
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Loss {
    fn sum<I: Iterator<Item = Self>>(losses: I) -> Self {
        losses.fold(Self::default(), |sum, loss| sum + loss)
    }
}
