//! File type detection, for helpful errors when someone passes a file that is not an ONNX model.

use bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};

use crate::{Error, error};

/// How a format is recognized: by magic bytes at an offset, or by a test of the first bytes.
enum Sign {
    At(usize, &'static [u8]),
    Looks(fn(&[u8]) -> bool),
}

/// A format: its sign, its name, and advice.
struct Format(Sign, &'static str, &'static str);

const DOWNLOAD: &str = "download the file itself: the link led to a page, or asked for a login";
const UNPACK: &str = "unpack it first";
const EXPORT: &str = "export the model to ONNX first";

#[rustfmt::skip]
const FORMATS: &[Format] = &[
    Format(Sign::At(0, b"version https://git-lfs"), "a git-lfs pointer", "fetch the file itself: git lfs pull"),
    Format(Sign::Looks(is_markup), "a web page", DOWNLOAD),
    Format(Sign::At(0, b"\x1f\x8b"), "a gzip archive", UNPACK),
    Format(Sign::At(0, b"PK\x03\x04"), "a zip archive or a PyTorch checkpoint", "unpack it, or export the model to ONNX first"),
    Format(Sign::At(0, b"\x28\xb5\x2f\xfd"), "a zstd archive", UNPACK),
    Format(Sign::At(0, b"\xfd7zXZ\0"), "an xz archive", UNPACK),
    Format(Sign::At(0, b"BZh"), "a bzip2 archive", UNPACK),
    Format(Sign::At(0, b"7z\xbc\xaf\x27\x1c"), "a 7z archive", UNPACK),
    // A POSIX tar header has its magic at offset 257.
    Format(Sign::At(257, b"ustar"), "a tar archive", UNPACK),
    Format(Sign::Looks(is_pickle), "a Python pickle, as PyTorch checkpoints are", EXPORT),
    Format(Sign::Looks(is_safetensors), "a safetensors file: weights without a graph", EXPORT),
    Format(Sign::At(0, b"GGUF"), "a GGUF file", EXPORT),
    Format(Sign::At(0, b"\x89HDF"), "an HDF5 file, as Keras writes", EXPORT),
    // FlatBuffers begin with a 4-byte offset; the file identifier follows.
    Format(Sign::At(4, b"TFL3"), "a TensorFlow Lite model", EXPORT),
    Format(Sign::At(0, b"ORTCACHE"), "a compiled model of this runtime", "load it from its file, which is mapped"),
    Format(Sign::At(0, b"\x93NUMPY"), "a NumPy array", "pass it as an input, and a model as the model"),
    Format(Sign::At(0, b"\x89PNG"), "a picture", "pass a model"),
    Format(Sign::At(0, b"\xff\xd8\xff"), "a picture", "pass a model"),
    Format(Sign::At(0, b"%PDF"), "a PDF document", "pass a model"),
    Format(Sign::At(0, b"\x7fELF"), "a program", "pass a model"),
    Format(Sign::Looks(is_zero), "a file that begins with zeros only", "download it again: the file was never filled"),
    Format(Sign::Looks(is_json), "JSON", "pass the binary .onnx file"),
    Format(Sign::Looks(is_text), "text", "pass the binary .onnx file"),
];

/// Returns the error for a file of another known format.
pub(super) fn known_format(bytes: &[u8]) -> Option<Error> {
    // The first match wins, so general formats (JSON, text) come last.
    let format = FORMATS.iter().find(|format| match format.0 {
        Sign::At(place, magic) => bytes.get(place..).is_some_and(|rest| rest.starts_with(magic)),
        Sign::Looks(looks) => looks(bytes),
    })?;
    Some(error!(InvalidProtobuf, "the file is not an ONNX model; it is {}", format.1).help(format.2))
}

/// Returns the error for bytes that do not decode: another format, a truncated file, or corruption.
pub(super) fn why_undecodable(bytes: &[u8], problem: &prost::DecodeError) -> Error {
    // Truncation first: a truncated model must not be mistaken for another format.
    if let Some(missing) = missing_bytes(bytes) {
        return error!(
            InvalidProtobuf,
            "the file is cut short: at least {missing} bytes are missing at its end"
        )
        .help("download or copy it again");
    }
    known_format(bytes).unwrap_or_else(|| {
        // prost tells the kind of a decode error only in its text.
        if problem.to_string().contains("UTF-8") {
            return error!(InvalidProtobuf, "a name or text of the model is not UTF-8: {problem}")
                .help("write it as UTF-8, or copy the file again if it is damaged");
        }
        error!(InvalidProtobuf, "the file is not an ONNX model, or is damaged: {problem}")
            .help("check that it is a binary .onnx file, and download or copy it again")
    })
}

/// The wire type of each field of `ModelProto`, by field number.
const MODEL_FIELDS: &[(u32, WireType)] = &[
    (1, WireType::Varint),
    (2, WireType::LengthDelimited),
    (3, WireType::LengthDelimited),
    (4, WireType::LengthDelimited),
    (5, WireType::Varint),
    (6, WireType::LengthDelimited),
    (7, WireType::LengthDelimited),
    (8, WireType::LengthDelimited),
    (14, WireType::LengthDelimited),
    (20, WireType::LengthDelimited),
    (25, WireType::LengthDelimited),
    (26, WireType::LengthDelimited),
];

/// Returns how many bytes the last field lacks, if the file is a valid model up to there.
fn missing_bytes(mut bytes: &[u8]) -> Option<u64> {
    let mut fields = 0;
    while bytes.has_remaining() {
        let (tag, wire_type) = decode_key(&mut bytes).ok()?;
        // Another field or wire type proves that these are not the bytes of a model.
        if !MODEL_FIELDS.contains(&(tag, wire_type)) {
            return None;
        }
        let Ok(number) = decode_varint(&mut bytes) else {
            // A varint has at most 10 bytes, so only a shorter rest can be truncated. Without a
            // complete field before it there is no evidence of a model.
            return (fields > 0 && bytes.len() < 10).then_some(1);
        };
        if wire_type == WireType::LengthDelimited {
            let remaining = bytes.remaining() as u64;
            if number > remaining {
                // A length larger than any file is corruption, not truncation.
                return (fields > 0 && number < 1 << 48).then(|| number - remaining);
            }
            // The cast is exact: the number is at most the length of a slice.
            bytes.advance(number as usize);
        }
        fields += 1;
    }
    None
}

fn trimmed(bytes: &[u8]) -> &[u8] {
    let head = bytes.get(..bytes.len().min(512)).unwrap_or(bytes);
    // A text may start with the byte order mark of UTF-8.
    head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start()
}

fn is_markup(bytes: &[u8]) -> bool {
    let head = trimmed(bytes).to_ascii_lowercase();
    [&b"<!doctype"[..], b"<html", b"<head", b"<body", b"<?xml", b"<!--"]
        .iter()
        .any(|tag| head.starts_with(tag))
}

fn is_pickle(bytes: &[u8]) -> bool {
    // Protocol 2 to 5, and an opcode that such files begin with.
    matches!(bytes, [0x80, 2..=5, b'c' | b']' | b'}' | b'(' | b'\x8a' | b'\x95', ..])
}

fn is_safetensors(bytes: &[u8]) -> bool {
    // A safetensors file is a little-endian length, a JSON header of that length, and the data.
    let Some((length, header)) = bytes.split_first_chunk::<8>() else { return false };
    header.first() == Some(&b'{') && u64::from_le_bytes(*length) <= header.len() as u64
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().take(64).all(|&byte| byte == 0)
}

fn is_json(bytes: &[u8]) -> bool {
    matches!(trimmed(bytes), [b'{' | b'[', ..]) && is_text(bytes)
}

fn is_text(bytes: &[u8]) -> bool {
    let head = bytes.get(..bytes.len().min(512)).unwrap_or(bytes);
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        // The cut at 512 bytes may split a character.
        Err(problem) if problem.error_len().is_none() => {
            std::str::from_utf8(head.get(..problem.valid_up_to()).unwrap_or_default()).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t'))
}
