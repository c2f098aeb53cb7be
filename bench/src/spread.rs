//! A handful of measurements of the same thing.

/// Least, middle and greatest of some measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl Spread {
    /// At least one measurement.
    pub fn of(measured: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = measured.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            unreachable!("nothing was measured");
        };
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Self { min, median, max }
    }

    /// Median, least and greatest, for a row of a table.
    pub fn cells(self, show: impl Fn(f64) -> String) -> [String; 3] {
        [show(self.median), show(self.min), show(self.max)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        assert_eq!(Spread::of([4.0, 1.0, 3.0, 2.0]), Spread { min: 1.0, median: 2.5, max: 4.0 });
        assert_eq!(Spread::of([2.0, 9.0, 1.0]), Spread { min: 1.0, median: 2.0, max: 9.0 });
    }
}
