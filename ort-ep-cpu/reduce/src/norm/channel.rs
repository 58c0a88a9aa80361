//! Iteration over the elements of one channel, which are in one row for each element of the batch.

use ort_cpu_threads::interrupt::{PIECE, Pace};

/// Elements of a part that is gathered from short rows.
const PART: usize = 512;
/// Rows at least this long are parts of their own.
const LONG_ROW: usize = 64;

/// Visits a channel of tensors of one shape `[batch, channels, spatial]`, part by part. Short rows
/// are gathered first, which is cheaper than a visit for each.
pub(super) fn for_each_part<T: Copy + Default, const N: usize>(
    tensors: [&[T]; N],
    [channels, spatial]: [usize; 2],
    channel: usize,
    mut visit: impl FnMut([&[T]; N]),
) {
    let length = tensors.first().map_or(0, |tensor| tensor.len());
    let pace = Pace::default();
    let begins = (channel * spatial..length).step_by((channels * spatial).max(1));
    let begins = begins.inspect(|_| pace.step(4 + spatial.min(PIECE)));
    if spatial >= LONG_ROW {
        return begins.for_each(|begin| visit(tensors.map(|tensor| &tensor[begin..begin + spatial])));
    }
    let (mut parts, mut filled) = ([[T::default(); PART]; N], 0);
    for begin in begins {
        if filled + spatial > PART {
            visit(parts.each_ref().map(|part| &part[..filled]));
            filled = 0;
        }
        for (part, tensor) in parts.iter_mut().zip(tensors) {
            let places = part[filled..filled + spatial].iter_mut();
            places.zip(&tensor[begin..begin + spatial]).for_each(|(place, element)| *place = *element);
        }
        filled += spatial;
    }
    visit(parts.each_ref().map(|part| &part[..filled]));
}

#[cfg(test)]
mod tests {
    use super::for_each_part;

    #[test]
    fn every_element_of_a_channel_once_and_in_order() {
        for (batch, channels, spatial) in [(3, 2, 100), (300, 3, 4), (1, 5, 1), (513, 1, 1), (0, 2, 7)] {
            let tensor: Vec<u32> = (0..(batch * channels * spatial) as u32).collect();
            for channel in 0..channels {
                let (mut one, mut two) = (Vec::new(), Vec::new());
                for_each_part([&tensor[..], &tensor], [channels, spatial], channel, |[a, b]| {
                    one.extend_from_slice(a);
                    two.extend_from_slice(b);
                });
                let rows = tensor.chunks_exact(spatial).skip(channel).step_by(channels);
                assert_eq!(one, rows.flatten().copied().collect::<Vec<_>>(), "{batch} {channels} {spatial}");
                assert_eq!(one, two);
            }
        }
    }
}
