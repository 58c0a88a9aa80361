//! `EmbedLayerNormalization`: the sizes of ids, tables and masks.

use crate::{Result, ensure, error};

/// The sizes of an `EmbedLayerNormalization`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedLayerNorm {
    /// The sequences.
    pub batch: usize,
    /// The tokens of a sequence.
    pub length: usize,
    /// The elements of an embedding.
    pub width: usize,
    /// The rows of the tables of words, positions and segments; 0 for a table that is absent.
    pub rows: [usize; 3],
    /// The position ids: one for each token of a sequence, or of all sequences.
    pub position_ids: usize,
}

impl EmbedLayerNorm {
    /// Reads the shapes of a node's inputs, by position.
    ///
    /// # Errors
    ///
    /// If they do not fit each other, or a token has no row to read.
    pub fn new<'a>(shape: impl Fn(usize) -> Option<&'a [usize]>) -> Result<EmbedLayerNorm> {
        let required =
            |index: usize| shape(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"));
        let count = |index: usize| shape(index).map(|shape| shape.iter().product::<usize>());
        let (ids, words) = (required(0)?, required(2)?);
        let (&[batch, length], &[vocabulary, width]) = (ids, words) else {
            return Err(error!(InvalidArgument, "ids {ids:?} and words {words:?}"));
        };
        let tokens = batch.saturating_mul(length);
        for (index, what) in [(1, "segment_ids"), (7, "mask")] {
            let fits = count(index).is_none_or(|count| count == tokens);
            ensure!(fits, InvalidArgument, "{what} {:?} for ids {ids:?}", shape(index));
        }
        // Without ids the positions are those of one sequence, and serve all of them.
        let position_ids = count(8).unwrap_or(length);
        let fits = position_ids == length || position_ids == tokens;
        ensure!(fits, InvalidArgument, "position_ids {:?} for ids {ids:?}", shape(8));
        let (gamma, beta) = (required(5)?, required(6)?);
        let fits = count(5) == Some(width) && count(6) == Some(width);
        ensure!(fits, InvalidArgument, "gamma {gamma:?} and beta {beta:?} for {width}");
        let mut rows = [vocabulary, 0, 0];
        for (index, table) in [(1, Some(required(3)?)), (2, shape(4))] {
            let Some(table) = table else { continue };
            let &[own, columns] = table else {
                return Err(error!(InvalidArgument, "a table of embeddings has shape {table:?}"));
            };
            ensure!(columns == width, InvalidArgument, "embeddings {table:?} for words {words:?}");
            rows.get_mut(index).into_iter().for_each(|rows| *rows = own);
        }
        let [_, positions, segments] = rows;
        // An index out of range reads the nearest row, so each table needs one.
        let has_rows = vocabulary > 0 && positions > 0 && (segments > 0 || shape(4).is_none());
        ensure!(has_rows || tokens == 0, InvalidArgument, "a table of embeddings has no row");
        Ok(EmbedLayerNorm { batch, length, width, rows, position_ids })
    }

    /// The tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.batch.saturating_mul(self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The inputs by position, in a batch of 2 sequences of 3 tokens and embeddings of 4 elements.
    fn read(changes: &[(usize, &'static [usize])]) -> Result<EmbedLayerNorm> {
        let mut shapes: [Option<&'static [usize]>; 9] =
            [Some(&[2, 3]), None, Some(&[7, 4]), Some(&[5, 4]), None, Some(&[4]), Some(&[4]), None, None];
        for (index, shape) in changes {
            shapes[*index] = Some(*shape);
        }
        EmbedLayerNorm::new(|index| shapes[index])
    }

    #[test]
    fn sizes_follow_from_shapes() {
        let plain = EmbedLayerNorm { batch: 2, length: 3, width: 4, rows: [7, 5, 0], position_ids: 3 };
        assert_eq!(read(&[]).unwrap(), plain);
        let given = read(&[(1, &[2, 3]), (4, &[2, 4]), (7, &[2, 3]), (8, &[2, 3])]).unwrap();
        assert_eq!(given, EmbedLayerNorm { rows: [7, 5, 2], position_ids: 6, ..plain });
        assert_eq!(read(&[(0, &[0, 3]), (3, &[0, 4])]).unwrap().tokens(), 0);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let table: [(usize, &'static [usize]); 8] =
            [(0, &[6]), (1, &[2, 2]), (3, &[5, 3]), (3, &[0, 4]), (4, &[4]), (5, &[3]), (7, &[3]), (8, &[2])];
        for (index, shape) in table {
            assert!(read(&[(index, shape)]).is_err(), "input {index} of shape {shape:?}");
        }
    }
}
