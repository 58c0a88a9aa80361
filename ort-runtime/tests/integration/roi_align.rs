//! `RoiAlign` of regions on the map, beside it and far larger than it.

use ort_runtime::ir::{Attribute, GraphBuilder};
use ort_runtime::{DType, Model, Result, Session, Tensor};

/// A map of 3 by 4 elements from -1 to -12, which makes samples off the map the greatest.
fn pooled(mode: &str, half_pixel: bool, samples: i64) -> Result<Vec<f32>> {
    let regions = [
        [0.5f32, 0.25, 3.0, 2.5],
        [-2.5, -2.5, 1.5, 1.5],
        [2.0, 1.0, 7.0, 6.0],
        [-5000.0, -5000.0, 5000.0, 5000.0],
        [3.0, 2.0, 1.0, 1.0],
        [-4.0, -4.0, 3.0, 3.0],
    ];
    let mut builder = GraphBuilder::new("pooled");
    let x = builder.input("x", DType::F32, &["1", "1", "3", "4"]);
    let rois = builder.input("rois", DType::F32, &["6", "4"]);
    let images = builder.constant(Tensor::from_slice(&[6], &[0i64; 6])?);
    let transform = if half_pixel { "half_pixel" } else { "output_half_pixel" };
    let text = |text: &str| Attribute::String(text.into());
    let attrs = [
        ("mode", text(mode)),
        ("coordinate_transformation_mode", text(transform)),
        ("output_height", Attribute::Int(2)),
        ("output_width", Attribute::Int(2)),
        ("sampling_ratio", Attribute::Int(samples)),
    ];
    let y = builder.node("RoiAlign", &[x, rois, images], &attrs)?;
    let session = Session::builder(&Model::from_graph(builder.finish(&[y])?)).threads(1).build()?;
    let elements: Vec<f32> = (1..=12).map(|x| -(x as f32)).collect();
    let x = Tensor::from_slice(&[1, 1, 3, 4], &elements)?;
    let rois = Tensor::from_slice(&[6, 4], regions.as_flattened())?;
    session.run(&[("x", x.into()), ("rois", rois.into())])?.remove(0).1.tensor()?.to_vec()
}

/// The values are those of ONNX Runtime 1.31.1. In the last region a sample is exactly at the
/// border of the map, which only rounding to `f32` decides.
#[test]
fn regions_agree_with_onnx_runtime() -> Result<()> {
    let cases: [(&str, bool, i64, [[f32; 4]; 6]); 5] = [
        (
            "avg",
            true,
            0,
            [
                [-2.875, -4.125, -7.375, -8.625],
                [0.0, 0.0, 0.0, -2.25],
                [-9.777778, 0.0, 0.0, 0.0],
                [-4e-8, -5.6e-7, -9.6e-7, -6.24e-6],
                [0.0; 4],
                [0.0, 0.0, 0.0, -5.390625],
            ],
        ),
        (
            "avg",
            true,
            2,
            [
                [-2.875, -4.125, -7.375, -8.625],
                [0.0, 0.0, 0.0, -2.25],
                [-9.8125, 0.0, 0.0, 0.0],
                [0.0; 4],
                [-8.0, -7.0, -6.0, -5.0],
                [0.0, 0.0, 0.0, -5.0625],
            ],
        ),
        (
            "max",
            true,
            2,
            [
                [-0.009765625, -0.046875, -0.087890625, -0.3515625],
                [0.0; 4],
                [0.0; 4],
                [0.0; 4],
                [-0.3125, -0.28125, -0.0625, -0.03125],
                [0.0; 4],
            ],
        ),
        (
            "max",
            false,
            0,
            [[-0.087890625, -0.0703125, 0.0, 0.0], [0.0; 4], [0.0; 4], [0.0; 4], [0.0; 4], [0.0; 4]],
        ),
        (
            "avg",
            false,
            3,
            [
                [-5.375, -6.625, -9.458333, -10.708333],
                [-0.11111111, -0.5185185, -1.074074, -3.7777774],
                [-4.6851854, 0.0, 0.0, 0.0],
                [0.0; 4],
                [-12.0; 4],
                [0.0, 0.0, 0.0, -6.6944447],
            ],
        ),
    ];
    for (mode, half_pixel, samples, expected) in cases {
        let got = pooled(mode, half_pixel, samples)?;
        for (index, (got, want)) in got.iter().zip(expected.as_flattened()).enumerate() {
            // Sums of millions of samples of almost no weight are the inexact ones.
            let close = (got - want).abs() <= 2e-6 * want.abs().max(0.1);
            assert!(close, "{mode} {half_pixel} {samples} at {index}: {got}, not {want}");
        }
    }
    Ok(())
}
