//! `ConvTranspose` as a GEMM with packed weights.

use ort_core::dim::Dim;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::Windows;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use super::window_of;
use ort_cpu_conv::{
    ConvAttributes, ConvGeometry, Input, WeightSide, pack_transposed_weights, packed_transposed_weights_len,
    transposed, transposed_workspace_len,
};
use ort_cpu_gemm::{Cpu, Step};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::packed::{PackedFloats, is_weight};
use ort_cpu_kernel::with_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::refused;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

cpu_kernels![
    KernelDef {
        op: "ConvTranspose",
        types: &[("T", SINGLE)],
        rank: 1,
        // Packing reads the weight at any alignment.
        unaligned: &[1],
        when: |node: &NodeView<'_>| {
            let constant = node.constant(1).is_some_and(|weight| matches!(weight.shape().len(), 3..=5));
            constant && is_weight(node.dtype(1))
        },
        make: |cx| via_f32(cx, make_packed),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "ConvTranspose",
        types: &[("T", SINGLE)],
        when: |node: &NodeView<'_>| matches!(node.rank(0).or(node.rank(1)), None | Some(3..=5)),
        make: |cx| via_f32(cx, make_unpacked),
        ..KernelDef::BASE
    },
];

struct Transposed {
    attrs: Attributes,
    groups: usize,
    /// The weight's shape and its packed values, if it is constant.
    weight: Option<(Shape, PackedFloats)>,
}

fn make_unpacked(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Transposed { attrs: cx.attrs().clone(), groups: groups_of(cx)?, weight: None }))
}

fn make_packed(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let weight = cx.constant(1).ok_or_else(|| error!(Fail, "the weight is not constant"))?;
    let (shape, groups) = (Shape::from_slice(weight.shape()), groups_of(cx)?);
    let cpu = Cpu::with_threads(cx.threads);
    // Packing does not depend on the image's size, so any size will do.
    let mut image = shape.clone();
    // The weight is [channels, filters / groups, ...].
    (image[0], image[1]) = (1, shape[0]);
    let attributes = ConvAttributes { groups, ..ConvAttributes::default() };
    let geometry = ConvGeometry::transposed(&image, &shape, &attributes).map_err(refused)?;
    let packed = PackedFloats::new(cx, packed_transposed_weights_len(cpu, &geometry), |packed| {
        with_weight!(weight, weights => {
            pack_transposed_weights(cpu, &geometry, weights, packed).map_err(refused)
        })
    })?;
    cx.consume(1);
    Ok(Box::new(Transposed { attrs: cx.attrs().clone(), groups, weight: Some((shape, packed)) }))
}

impl Transposed {
    fn geometry(&self, image: &[usize], weight: &[usize]) -> Result<ConvGeometry> {
        let weight = self.weight.as_ref().map_or(weight, |(shape, _)| shape);
        ensure!(
            weight.len() >= 3 && weight.len() == image.len(),
            InvalidArgument,
            "an image of shape {image:?} does not match a weight of shape {weight:?}"
        );
        let kernel: Vec<Dim> = weight[2..].iter().map(|&size| Dim::constant(size as i64)).collect();
        let windows = Windows::new(&self.attrs, &kernel)?;
        // The axes of the forward convolution, whose input is this result.
        let axes = windows.transposed_on(&self.attrs, &image[2..])?;
        // The library checks channels and groups. We computed the windows from the node's
        // attributes.
        let attributes = ConvAttributes { groups: self.groups, ..ConvAttributes::default() };
        let mut geometry = ConvGeometry::transposed(image, weight, &attributes).map_err(refused)?;
        geometry.window = window_of(&axes)?;
        Ok(geometry)
    }

    fn packed_len(&self, cpu: Cpu, geometry: &ConvGeometry) -> usize {
        match self.weight {
            Some(_) => 0,
            None => packed_transposed_weights_len(cpu, geometry).next_multiple_of(16),
        }
    }
}

impl Executable for Transposed {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let cpu = Cpu::with_threads(shapes.threads);
        let geometry = self.geometry(shapes.input(0), shapes.input(1))?;
        bytes_of::<f32>(self.packed_len(cpu, &geometry) + transposed_workspace_len(cpu, &geometry))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let (image, weight) = (cx.input(0)?, cx.find_input(1));
        let geometry = self.geometry(image.shape(), weight.map_or(&[], |weight| weight.shape()))?;
        let weights: &[f32] = match &self.weight {
            Some((_, packed)) => packed.values(),
            None => {
                let packed = take(&mut rest, self.packed_len(cpu, &geometry))?;
                let weight = cx.input(1)?.as_slice::<f32>()?;
                pack_transposed_weights(cpu, &geometry, weight, packed).map_err(refused)?;
                packed
            }
        };
        let bias = cx.find_input(2).map(|bias| bias.as_slice::<f32>()).transpose()?;
        let steps = bias.map(|bias| [Step::RowBias(bias)]);
        let epilogue = steps.as_ref().map_or(&[][..], |steps| &steps[..]);
        let input = Input { image: image.as_slice()?, weights, side: WeightSide::Lhs, epilogue };
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        transposed(cpu, &geometry, input, output, rest).map_err(refused)
    }
}
