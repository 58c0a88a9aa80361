//! Tests of rendered PTX.

use super::*;

const SAME: Source = Source { dtype: DType::F32, place: InputPlace::Same, start: 0 };

fn text(formula: &str, dtype: DType, inputs: usize) -> Result<String> {
    let sources = vec![Source { dtype, ..SAME }; inputs];
    let formula = formula.parse()?;
    render(&Entry {
        formula: &formula,
        number: Number::of(dtype)?,
        inputs: &sources,
        output: dtype,
        rank: 1,
        four: false,
    })
}

#[test]
fn simple_functions_are_instructions() {
    let sum = text("add(mul(x0, x1), 2)", DType::F32, 2).unwrap();
    assert!(sum.contains("mul.rn.f32") && sum.contains("add.rn.f32") && sum.contains("0f40000000"));
    assert!(!sum.contains(".func"), "nothing is called: {sum}");
    assert!(sum.contains(
        ".visible .entry elementwise(.param .u64 x0, .param .u64 x1, .param .u64 y, .param .u32 count)"
    ));
    let whole = text("round(x0)", DType::F64, 1).unwrap();
    assert!(whole.contains("cvt.rni.f64.f64"));
    let chosen = text("select(less(x0, x1), 3, neg(x0))", DType::I32, 2).unwrap();
    assert!(chosen.contains("setp.lt.s32") && chosen.contains("neg.s32") && chosen.contains("selp.b32"));
    assert!(text("mod(x0, x1)", DType::I64, 2).unwrap().contains("rem.s64"));
}

#[test]
fn other_functions_are_called_once() {
    let silu = text("mul(x0, sigmoid(x0))", DType::F16, 1).unwrap();
    assert_eq!(silu.matches("call.uni").count(), 1);
    assert!(silu.contains("ort_sigmoid(") && silu.contains("cvt.rn.f16.f32"));
    let twice = text("add(exp(x0), exp(x0))", DType::F64, 1).unwrap();
    assert_eq!(twice.matches("call.uni").count(), 1, "equal parts are computed once");
    assert!(text("pow(x0, x1)", DType::I64, 2).unwrap().contains("ort_pow_s64"));
}

#[test]
fn minima_keep_what_is_no_number() {
    let least = text("min(x0, x1)", DType::F32, 2).unwrap();
    assert!(least.contains("setp.nan.f32") && !least.contains("min.f32"));
    assert!(text("min(x0, x1)", DType::U8, 2).unwrap().contains("min.u32"));
}

#[test]
fn integers_have_no_float_functions() {
    assert!(text("exp(x0)", DType::I32, 1).is_err());
    assert!(text("sqrt(x0)", DType::U64, 1).is_err());
    assert!(text("x1", DType::F32, 1).is_err(), "an input that is not there");
}

#[test]
fn steps_and_vectors() {
    let formula: ScalarExpr = "add(x0, x1)".parse().unwrap();
    let bias = Source { place: InputPlace::Steps { last: true }, ..SAME };
    let entry = Entry {
        formula: &formula,
        number: Number::F32,
        inputs: &[SAME, bias],
        output: DType::BF16,
        rank: 3,
        four: true,
    };
    let text = render(&entry).unwrap();
    assert!(text.contains("sizes[32], .param .align 4 .b8 steps1[32]"));
    assert_eq!(text.matches("div.u32").count(), 2);
    assert_eq!(text.matches("ld.global.v4.f32").count(), 2);
    assert!(text.contains("st.global.v4.b16"));
}
