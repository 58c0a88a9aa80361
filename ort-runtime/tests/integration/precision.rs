//! Products in bfloat16, those of attention too: close to those in float32 and not the same, the
//! same on any number of threads, half the weights' memory; and refused where the CPU has no
//! instructions for them.

use ort_runtime::ep::Precision;
use ort_runtime::ir::{Attribute, GraphBuilder};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// Numbers in (-1, 1) without a pattern.
fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let mix = |index: usize| ((index * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|index| mix(index) as f32 / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_slice(shape, &values)
}

/// An operator over an input and a constant weight of these shapes; for attention, the weight is
/// keys, and values are as many.
fn model(op: &str, shapes: [&[usize]; 2], attrs: &[(&'static str, Attribute)]) -> Result<(Model, Value)> {
    let mut builder = GraphBuilder::new("precision");
    let sizes: Vec<String> = shapes[0].iter().map(usize::to_string).collect();
    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
    let input = builder.input("x", DType::F32, &sizes);
    let mut inputs = vec![input, builder.constant(numbers(shapes[1], 2)?)];
    if op == "Attention" {
        inputs.push(builder.constant(numbers(shapes[1], 3)?));
    }
    let result = builder.node(op, &inputs, attrs)?;
    Ok((Model::from_graph(builder.finish(&[result])?), numbers(shapes[0], 1)?.into()))
}

#[test]
fn close_to_float32_or_refused() -> Result<()> {
    let pads = ("pads", Attribute::Ints(vec![1, 1, 1, 1]));
    let cases: [(&str, [&[usize]; 2], &[(&'static str, Attribute)]); 8] = [
        ("MatMul", [&[3, 40, 301], &[301, 70]], &[]),
        ("MatMul", [&[1, 900], &[900, 130]], &[]),
        ("Gemm", [&[33, 64], &[100, 64]], &[("transB", Attribute::Int(1))]),
        ("Conv", [&[2, 24, 30, 31], &[40, 24, 3, 3]], std::slice::from_ref(&pads)),
        ("Conv", [&[1, 64, 20, 21], &[80, 64, 3, 3]], std::slice::from_ref(&pads)),
        ("Conv", [&[1, 64, 7, 7], &[80, 64, 1, 1]], &[]),
        ("Attention", [&[2, 6, 50, 64], &[2, 6, 131, 64]], &[]),
        ("Attention", [&[1, 8, 33, 20], &[1, 2, 300, 20]], &[]),
    ];
    for (op, shapes, attrs) in cases {
        let (model, input) = model(op, shapes, attrs)?;
        let session = |precision: Precision, threads: usize| {
            Session::builder(&model).precision(precision).threads(threads).build()
        };
        let run = |session: &Session| -> Result<Vec<f32>> {
            let results = session.run(&[("x", input.clone())])?;
            results[0].1.tensor()?.to_vec::<f32>()
        };
        let wide = session(Precision::Fp32, 1)?;
        let exact = run(&wide)?;
        let narrow = match session(Precision::Bf16, 1) {
            Ok(session) => {
                let [most, packed] = [&wide, &session].map(|session| session.memory().packed);
                assert!(100 * packed <= 51 * most, "{op} {shapes:?}: weights take {packed} of {most} bytes");
                run(&session)?
            }
            Err(error) => {
                assert!(error.to_string().contains("AVX512-BF16"), "{error}");
                eprintln!("this CPU has no products of bfloat16");
                return Ok(());
            }
        };
        let largest = exact.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        // Unlike `f32::max`, `total_cmp` keeps a NaN.
        let errors = exact.iter().zip(&narrow).map(|(x, y)| (x - y).abs());
        let error = errors.max_by(f32::total_cmp).unwrap_or(0.0);
        assert!(error > 0.0 && error < 2e-2 * largest, "{op} {shapes:?}: {error} of {largest}");
        for threads in [2, 3] {
            assert!(
                narrow == run(&session(Precision::Bf16, threads)?)?,
                "{op} {shapes:?} on {threads} threads"
            );
        }
    }
    Ok(())
}
