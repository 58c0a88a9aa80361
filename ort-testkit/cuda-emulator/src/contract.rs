//! Contraction of `mul.f32` with `add.f32` or `sub.f32` to `fma.rn.f32`, within a basic block and
//! only if neither names a rounding mode.
//!
//! The PTX ISA allows the driver's assembler to contract ("add": "may be optimized aggressively"),
//! and it does so by default. Which pairs it contracts is up to the assembler. We contract all of
//! them, so that code which needs a rounded product fails without a GPU.

use std::collections::HashMap;

/// Returns the text of a module with its multiplications contracted.
pub(crate) fn contract(text: &str) -> String {
    // The factors of each product, until one of the three registers is overwritten.
    let mut products = HashMap::<&str, [&str; 2]>::new();
    let mut contracted = String::with_capacity(text.len() + text.len() / 16);
    for line in text.lines() {
        match fused(line, &products) {
            Some(fused) => contracted.push_str(&fused),
            None => contracted.push_str(line),
        }
        contracted.push('\n');
        if ends_block(line) {
            products.clear();
        }
        for name in written(line) {
            products.retain(|product, factors| *product != name && !factors.contains(&name));
        }
        // A product that overwrites one of its factors cannot be recomputed later.
        if let Some([product, a, b]) = operands(line, "mul.f32")
            && ![a, b].contains(&product)
        {
            products.insert(product, [a, b]);
        }
    }
    contracted
}

/// Whether a line ends a basic block: control may leave here or arrive from elsewhere.
fn ends_block(line: &str) -> bool {
    let line = line.trim();
    line.ends_with(':')
        || line.starts_with(['@', '{', '}', '.'])
        || line.starts_with("bra")
        || line.starts_with("call")
}

/// The float registers in the first operand, which the instruction writes; braces enclose a vector.
fn written(line: &str) -> impl Iterator<Item = &str> {
    let rest = line.trim().split_once(char::is_whitespace).map_or("", |(_, rest)| rest.trim());
    let list = match rest.strip_prefix('{') {
        Some(list) => list.split('}').next(),
        None => rest.split([',', ';']).next(),
    };
    list.unwrap_or_default().split(',').map(str::trim).filter(|name| name.starts_with("%f"))
}

/// The three operands of an instruction of this name.
fn operands<'a>(line: &'a str, name: &str) -> Option<[&'a str; 3]> {
    let rest = line.trim().strip_prefix(name)?.strip_suffix(';')?;
    let mut operands = rest.split(',').map(str::trim);
    let found = [operands.next()?, operands.next()?, operands.next()?];
    rest.starts_with(char::is_whitespace).then_some(found)
}

/// Returns the contraction of an addition or subtraction whose operand is a product.
fn fused(line: &str, products: &HashMap<&str, [&str; 2]>) -> Option<String> {
    if let Some([to, a, b]) = operands(line, "add.f32") {
        let ([x, y], other) = match products.get(a) {
            Some(factors) => (factors, b),
            None => (products.get(b)?, a),
        };
        return Some(format!("\tfma.rn.f32 {to}, {x}, {y}, {other};"));
    }
    let [to, a, b] = operands(line, "sub.f32")?;
    // The rewrite writes `-b` to the destination first, which must therefore not be a factor.
    let [x, y] = products.get(a).filter(|factors| !factors.contains(&to) && b.starts_with('%'))?;
    Some(format!("\tneg.f32 {to}, {b};\n\tfma.rn.f32 {to}, {x}, {y}, {to};"))
}

#[cfg(test)]
mod tests {
    use super::contract;

    #[test]
    fn products_without_a_rounding_are_contracted_within_their_block() {
        let product = "\tmul.f32 \t%f3, %f1, %f2;\n";
        // (what follows the product, what it becomes)
        let cases = [
            ("\tadd.f32 \t%f5, %f3, %f4;", "\tfma.rn.f32 %f5, %f1, %f2, %f4;"),
            ("\tadd.f32 \t%f5, %f4, %f3;", "\tfma.rn.f32 %f5, %f1, %f2, %f4;"),
            ("\tsub.f32 \t%f5, %f3, %f4;", "\tneg.f32 %f5, %f4;\n\tfma.rn.f32 %f5, %f1, %f2, %f5;"),
        ];
        for (line, expected) in cases {
            assert_eq!(contract(&format!("{product}{line}\n")), format!("{product}{expected}\n"));
        }
        let sum = "\tadd.f32 \t%f5, %f3, %f4;\n";
        for between in [
            "$L__BB0_1:\n",
            "@%p1 bra $L__BB0_1;\n",
            "\tmov.f32 \t%f2, %f7;\n",
            "\tld.shared.v2.f32 \t{%f9, %f1}, [%r1];\n",
            "\tfma.rn.f32 \t%f3, %f3, %f7, %f7;\n",
        ] {
            let text = format!("{product}{between}{sum}");
            assert_eq!(contract(&text), text);
        }
        for line in [
            "\tadd.rn.f32 \t%f5, %f3, %f4;\n",
            "\tsub.f32 \t%f1, %f3, %f4;\n",
            "\tadd.f64 \t%fd5, %fd3, %fd4;\n",
        ] {
            let text = format!("{product}{line}");
            assert_eq!(contract(&text), text);
        }
        let rounded = "\tmul.rn.f32 \t%f3, %f1, %f2;\n\tadd.f32 \t%f5, %f3, %f4;\n";
        assert_eq!(contract(rounded), rounded);
    }
}
