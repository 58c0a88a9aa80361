//! String normalization, concatenation, splitting and regex matching.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::spec::broadcast;
use ort_core::tensor::{CompactString, Shape};
use ort_core::{Result, ensure, error, unknown_name};
use regex::Regex;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{spend, spend_text, spending};

cpu_kernels![
    KernelDef {
        op: "StringNormalizer",
        outputs: OutputsFrom::Kernel,
        make: make_normalizer,
        ..KernelDef::BASE
    },
    KernelDef {
        op: "StringConcat",
        outputs: OutputsFrom::Kernel,
        make: |_| Ok(Box::new(concat)),
        ..KernelDef::BASE
    },
    KernelDef { op: "StringSplit", outputs: OutputsFrom::Kernel, make: make_split, ..KernelDef::BASE },
    KernelDef { op: "RegexFullMatch", make: make_match, ..KernelDef::BASE },
];

/// How letters change case.
#[derive(Clone, Copy, PartialEq)]
enum Case {
    Keep,
    Lower,
    Upper,
}

impl Case {
    fn apply(self, text: &str) -> String {
        match self {
            Case::Keep => text.to_string(),
            Case::Lower => text.to_lowercase(),
            Case::Upper => text.to_uppercase(),
        }
    }
}

fn make_normalizer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let case = match cx.attrs().string("case_change_action")? {
        "NONE" => Case::Keep,
        "LOWER" => Case::Lower,
        "UPPER" => Case::Upper,
        other => return Err(unknown_name("case_change_action", other, &["NONE", "LOWER", "UPPER"])),
    };
    let sensitive = cx.attrs().flag("is_case_sensitive")?;
    // Case-insensitive comparison uses lower case.
    let folded = move |word: &str| if sensitive { word.to_string() } else { word.to_lowercase() };
    let stopwords = cx.attrs().find_strings("stopwords").unwrap_or(&[]);
    let stopwords: std::collections::HashSet<String> = stopwords.iter().map(|word| folded(word)).collect();
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let mut shape: Shape = input.shape().into();
        ensure!(
            shape.len() == 1 || (shape.len() == 2 && shape[0] == 1),
            InvalidArgument,
            "StringNormalizer takes shape [C] or [1, C], got {shape:?}"
        );
        let words = || input.strings().unwrap_or(&[]).iter().inspect(|word| spend_text(word));
        let kept = || words().filter(|word| !stopwords.contains(&folded(word)));
        // Two passes over the words, because the output's shape comes first.
        let count = kept().count();
        if let Some(last) = shape.last_mut() {
            *last = count.max(1);
        }
        // If no word is left, the result is one empty string.
        let none = (count == 0).then(String::new);
        let words = cx.strings(&shape, kept().map(|word| case.apply(word)).chain(none))?;
        cx.set(0, words)
    }))
}

fn concat(cx: &mut RunCx<'_>) -> Result<()> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let shape = broadcast::shapes(&[a.shape(), b.shape()])?;
    let count = ort_core::tensor::element_count(&shape)?;
    let places = |operand: &[usize]| -> Vec<usize> {
        // The stride along each axis of the output; 0 if the operand is broadcast along it.
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for (axis, &size) in operand.iter().enumerate().rev() {
            strides[shape.len() - operand.len() + axis] = if size == 1 { 0 } else { stride };
            stride *= size;
        }
        strides
    };
    let (a_strides, b_strides) = (places(a.shape()), places(b.shape()));
    let at = |mut index: usize, strides: &[usize]| {
        let mut place = 0;
        for (size, stride) in shape.iter().zip(strides).rev() {
            place += index % size * stride;
            index /= size;
        }
        place
    };
    let (left, right) = (a.strings()?, b.strings()?);
    let joined = (0..count).map(|index| {
        let parts = [&left[at(index, &a_strides)], &right[at(index, &b_strides)]];
        // Of the length at once: growing would take more memory meanwhile.
        let mut joined = CompactString::with_capacity(parts[0].len() + parts[1].len());
        parts.into_iter().for_each(|part| joined.push_str(part));
        joined
    });
    let joined = cx.strings(&shape, joined)?;
    cx.set(0, joined)
}

fn make_split(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let delimiter = cx.attrs().find_string("delimiter").unwrap_or("").to_string();
    let limit = cx.attrs().find_int("maxsplit").and_then(|limit| usize::try_from(limit).ok());
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let texts = input.strings()?;
        let mut counts = cx.allocate(DType::I64, input.shape())?;
        let mut most = 0;
        for (text, count) in texts.iter().zip(counts.as_mut_slice::<i64>()?) {
            spend_text(text);
            let parts = spending(1, split(text, &delimiter, limit)).count();
            most = most.max(parts);
            *count = parts as i64;
        }
        let mut shape: Shape = input.shape().into();
        shape.push(most);
        // One text with many parts widens all rows, so the parts are split again instead of kept.
        let padded = texts
            .iter()
            .flat_map(|text| split(text, &delimiter, limit).chain(std::iter::repeat("")).take(most));
        let padded = cx.strings(&shape, padded)?;
        cx.set(0, padded)?;
        cx.set(1, counts.finish()?)
    }))
}

/// Splits a text at most `limit` times, at the delimiter, or at runs of white space if the
/// delimiter is empty.
fn split<'t>(
    text: &'t str,
    delimiter: &'t str,
    limit: Option<usize>,
) -> Box<dyn Iterator<Item = &'t str> + 't> {
    let most = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    if !delimiter.is_empty() {
        return Box::new(text.splitn(most, delimiter));
    }
    // Runs of white space at both ends make no empty parts.
    let (mut rest, mut cuts) = (text.trim(), 0);
    Box::new(std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        cuts += 1;
        let cut = if cuts < most { rest.split_once(char::is_whitespace) } else { None };
        let (part, behind) = cut.unwrap_or((rest, ""));
        rest = behind.trim_start();
        Some(part)
    }))
}

fn make_match(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let pattern = cx.attrs().find_string("pattern").unwrap_or("");
    // The group keeps an alternation in the pattern between both anchors.
    let anchored = format!("^(?:{pattern})$");
    // Without the flag `m`, `$` matches only at the end of the text.
    let regex = Regex::new(&anchored)
        .map_err(|problem| error!(InvalidGraph, "the pattern '{pattern}' is not valid: {problem}"))?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let texts = cx.input(0)?.strings()?;
        let output = cx.output(0)?.bytes_mut()?;
        for (text, matches) in texts.iter().zip(output) {
            spend(32 + 16 * text.len());
            *matches = u8::from(regex.is_match(text));
        }
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn texts_split() {
        let table: &[(&str, &str, Option<usize>, &[&str])] = &[
            ("a  b c", " ", None, &["a", "", "b", "c"]),
            (" a  b c ", "", None, &["a", "b", "c"]),
            ("a b  c d", "", Some(1), &["a", "b  c d"]),
            ("a-b-c", "-", Some(0), &["a-b-c"]),
            ("", "-", None, &[""]),
            ("", "", None, &[]),
        ];
        for (text, delimiter, limit, parts) in table {
            let found: Vec<&str> = split(text, delimiter, *limit).collect();
            assert_eq!(found, *parts, "{text:?} at {delimiter:?}");
        }
    }
}
