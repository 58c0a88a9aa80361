//! Contraction: within a basic block, `add.f32` and `sub.f32` of a `mul.f32` become `fma.rn.f32`
//! where neither names a rounding.
//!
//! The PTX ISA lets the driver's assembler do so ("add": "may be optimized aggressively"), and it
//! does by default. Which products it takes is its own affair; here all are taken, so that what
//! needs a product rounded shows without a GPU.

use std::collections::HashMap;

/// The text of a module with its products contracted.
pub(crate) fn contract(text: &str) -> String {
    // Of each product the factors, as long as none of the three is written again.
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
        if let Some([product, a, b]) = operands(line, "mul.f32")
            && ![a, b].contains(&product)
        {
            products.insert(product, [a, b]);
        }
    }
    contracted
}

/// Whether control may come from or go elsewhere.
fn ends_block(line: &str) -> bool {
    let line = line.trim();
    line.ends_with(':')
        || line.starts_with(['@', '{', '}', '.'])
        || line.starts_with("bra")
        || line.starts_with("call")
}

/// The registers of floats that an instruction writes first: several stand in braces.
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

/// What a sum or difference becomes, if it is one of a product.
fn fused(line: &str, products: &HashMap<&str, [&str; 2]>) -> Option<String> {
    if let Some([to, a, b]) = operands(line, "add.f32") {
        let ([x, y], other) = match products.get(a) {
            Some(factors) => (factors, b),
            None => (products.get(b)?, a),
        };
        return Some(format!("\tfma.rn.f32 {to}, {x}, {y}, {other};"));
    }
    let [to, a, b] = operands(line, "sub.f32")?;
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
