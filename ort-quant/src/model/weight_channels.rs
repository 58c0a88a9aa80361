//! The channels of a product that the elements of its weight connect.

use ort_core::onnx::proto::NodeProto;

use super::draft::integer_of;
use super::work::is_standard;

/// Which channels of input and output an element of a weight connects.
pub(super) struct WeightChannels {
    /// Of a matrix: rows and columns, and whether rows are outputs.
    matrix: Option<(usize, usize, bool)>,
    /// Of filters: those of all groups, those of a group, the inputs of each, and its elements per
    /// input.
    filters: (usize, usize, usize, usize),
}

impl WeightChannels {
    pub(super) fn of(product: &NodeProto, shape: &[usize]) -> WeightChannels {
        match shape {
            [rows, columns] => {
                let is_transposed = is_standard(product, "Gemm") && integer_of(product, "transB", 0) != 0;
                WeightChannels { matrix: Some((*rows, *columns, is_transposed)), filters: (0, 1, 1, 1) }
            }
            [outputs, inputs, kernel @ ..] => {
                let groups = usize::try_from(integer_of(product, "group", 1)).unwrap_or(1).max(1);
                let kernel: usize = kernel.iter().product();
                let filters = (*outputs, (outputs / groups).max(1), (*inputs).max(1), kernel.max(1));
                WeightChannels { matrix: None, filters }
            }
            _ => WeightChannels { matrix: None, filters: (0, 1, 1, 1) },
        }
    }

    /// The channels of the input.
    pub(super) fn inputs(&self) -> usize {
        match self.matrix {
            Some((_, columns, true)) => columns,
            Some((rows, _, false)) => rows,
            None => self.filters.0 / self.filters.1 * self.filters.2,
        }
    }

    /// The channels of the output.
    pub(super) fn outputs(&self) -> usize {
        match self.matrix {
            Some((rows, _, true)) => rows,
            Some((_, columns, false)) => columns,
            None => self.filters.0,
        }
    }

    /// Input and output of an element.
    pub(super) fn at(&self, element: usize) -> (usize, usize) {
        if let Some((_, columns, is_transposed)) = self.matrix {
            let (row, column) = (element / columns.max(1), element % columns.max(1));
            return if is_transposed { (column, row) } else { (row, column) };
        }
        let (_, of_group, inputs, kernel) = self.filters;
        let output = element / (inputs * kernel);
        (output / of_group * inputs + element / kernel % inputs, output)
    }
}

#[cfg(test)]
mod tests {
    use super::super::draft::integer;
    use super::*;

    /// Of the definitions of the operators: `np.indices(shape)` read by hand.
    #[test]
    fn elements_connect_channels() {
        let conv = |groups: i64| NodeProto {
            op_type: Some("Conv".into()),
            attribute: vec![integer("group", groups)],
            ..NodeProto::default()
        };
        let gemm = NodeProto {
            op_type: Some("Gemm".into()),
            attribute: vec![integer("transB", 1)],
            ..NodeProto::default()
        };
        let product = NodeProto { op_type: Some("MatMul".into()), ..NodeProto::default() };
        let cases: [(&NodeProto, &[usize], usize, (usize, usize)); 6] = [
            (&product, &[3, 5], 7, (1, 2)),
            (&gemm, &[3, 5], 7, (2, 1)),
            (&conv(1), &[4, 3, 2, 2], 17, (1, 1)),
            // The second group begins with the third filter and the fourth input.
            (&conv(2), &[4, 3, 2, 2], 29, (4, 2)),
            (&conv(4), &[8, 1, 3, 3], 30, (1, 3)),
            (&conv(1), &[2, 3, 5], 16, (0, 1)),
        ];
        for (node, shape, element, expected) in cases {
            assert_eq!(WeightChannels::of(node, shape).at(element), expected, "{shape:?}");
        }
    }
}
