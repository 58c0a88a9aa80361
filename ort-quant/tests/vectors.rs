//! Results against those of ONNX Runtime 1.31.1, which its functions `quantize_matmul_*`,
//! `quantize_qdq_matmul_4bits` and `quantize_matmul_bnb4` wrote for the same weights.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use half::f16;
use ort_core::ErrorKind;
use ort_quant::{
    Bits, BlockLayout, BlockQuantizer, BlockSizes, Bnb4Quantizer, Bnb4Type, QuantizedBlocks, Weight,
};

/// Results of float32 weights in hexadecimal: 20 x 8 by blocks of 16, or 21 x 7 by blocks of 5.
struct Small {
    layout: BlockLayout,
    bits: Bits,
    is_symmetric: bool,
    codes: &'static str,
    scales: &'static str,
    zero_points: &'static str,
}

const SMALL: &[Small] = &[
    Small {
        layout: BlockLayout::MatMulNBits,
        bits: Bits::Two,
        is_symmetric: true,
        codes: "890ff6bb0a000000aaaaaaaaaa000000e19d7d863b000000159a100511000000250a5058050000002aaaaaaa2a\
                000000aaa2aaaadc0000003333333333000000",
        scales: "00c0f2c000009ec0000000800000008000002040000060c00040f4c000c0e4c00000cd400000b140e6b1e1fee6\
                 b1e1fee6b1e17e0040f4400000c03f0000c03f",
        zero_points: "",
    },
    Small {
        layout: BlockLayout::MatMulNBits,
        bits: Bits::Two,
        is_symmetric: false,
        codes: "76a00544f10000000000000000000000e5ad7d96c4000000e650dba9de000000394ba45805000000c0000000c0\
                000000fff3ffffdc0000007777777777000000",
        scales: "55551f41abaa5d400000000000000000555555405555854055d5a24000809840abaa884000006c409976967e99\
                 76967e9976967eab2a13410000004000000040",
        zero_points: "a1a0a6a0afa0abaa",
    },
    Small {
        layout: BlockLayout::MatMulNBits,
        bits: Bits::Four,
        is_symmetric: true,
        codes: "8590ce0069fcaf8f86010000000000008888888888888888888800000000000022cab466f33f46a0ae0e000000\
                000000631388752005352204050000000000005207682110556043220000000000000088088888888888888808\
                0000000000008888088888888888e0d40000000000000f0f0f0f0f0f0f0f0f0f000000000000",
        scales: "00c0f2bf00009ebf00000080000000800000203f000060bf0040f4bf00c0e4bf0000cd3f0000b13fe6b1e1fde6\
                 b1e1fde6b1e17d0040f43f0000c03e0000c03e",
        zero_points: "",
    },
    Small {
        layout: BlockLayout::MatMulNBits,
        bits: Bits::Four,
        is_symmetric: false,
        codes: "7a6f42ee9603507104fe0000000000000000000000000000000000000000000023cab476f44f47a150f1000000\
                00000049d91035cff5a5ccf8f6000000000000a40dcf323089c176450000000000000000f000000000000000f0\
                000000000000ffff0ffffffffffff0d40000000000001f1f1f1f1f1f1f1f1f1f000000000000",
        scales: "efeefe3f5555313f0000000000000000abaa2a3f5555553f4444823f0000743fabaa5a3fcdcc3c3fc2bd707dc2\
                 bd707dc2bd707d7777eb3fcdcccc3ecdcccc3e",
        zero_points: "17007800ff008f88",
    },
    Small {
        layout: BlockLayout::MatMulNBits,
        bits: Bits::Eight,
        is_symmetric: true,
        codes: "547a0098dbbb0405905abffcf69ce97961870c0000000000000000000000000080808080808080808080808080\
                80808080808080000000000000000000000000261a9ac040b35a6633f3ff336640009ae59bdb00000000000000\
                000000000000335b33147c7c566a031b530055281c1c3f004a01000000000000000000000000215772017e660d\
                1a001749480665323e272000030000000000000000000000008080800080808080808080808080808080808000\
                0000000000000000000000008080808080008080808080808080808000e743c9000000000000000000000000ff\
                00ff00ff00ff00ff00ff00ff00ff00ff00ff00000000000000000000000000",
        scales: "00c0f2bd00009ebd00000080000000800000203d000060bd0040f4bd00c0e4bd0000cd3d0000b13de6b1e1fbe6\
                 b1e1fbe6b1e17b0040f43d0000c03c0000c03c",
        zero_points: "",
    },
    Small {
        layout: BlockLayout::MatMulNBits,
        bits: Bits::Eight,
        is_symmetric: false,
        codes: "aa83ff652042faf96da33e00066012844800e8ff00000000000000000000000000000000000000000000000000\
                00000000000000000000000000000000000000261999bf3fb2596633f2ff33663f009900510aff000000000000\
                0000000000009a499ad80809532bf9ca59ff56aec8c782ff6cfc00000000000000000000000041ade302fbcc1b\
                34002d91900cc9647b4d400007000000000000000000000000000000ff000000000000000000000000000000ff\
                000000000000000000000000ffffffffff00ffffffffffffffffffff00ff4ade000000000000000000000000ff\
                01ff01ff01ff01ff01ff01ff01ff01ff01ff01000000000000000000000000",
        scales: "f0efef3de7e6263d0000000000000000a1a0203dc9c8483d3535753da6a5653dcecd4d3db2b1313d7a94627b7a\
                 94627b7a94627b9e9ddd3dc1c0c03cc1c0c03c",
        zero_points: "7d0d00007f700000ffff0000ff8d8080",
    },
    Small {
        layout: BlockLayout::Qdq,
        bits: Bits::Four,
        is_symmetric: true,
        codes: "0d85098b50dbe009e70cc1808e88099d08051008800ac80fb0e0990008e10bd0408b0007ca0f0880db4003de08\
                87d088f007b40a0370cef0089a0b4f808c80088a0bbc20b07808880808",
        scales: "00c0e5bf00000080000040bf004093bf0000b63fe6b1e1fd0000cf3f0000e9bf00000080000060bf00c0c7bf00\
                 80ee3f00000080e6b1e17d0040f43f00000080000070bf0080bebf00c0f23f000000800080a8bf00c0c73f0000\
                 00800000603f0080debf0080be3fe6b1e1fd00c0ecbf0080843f000000800000203f00001ebe00008f3f000000\
                 800000dcbf",
        zero_points: "",
    },
    Small {
        layout: BlockLayout::Qdq,
        bits: Bits::Four,
        is_symmetric: false,
        codes: "06f202f3209a700d40078af0050f0dea011f40ef000b8f0d9f701ef00f34056f0009f00f8c0d8ff0a9300b6700\
                00800f800fa004a4f0838000d205f80008f001f2064ba0610f00f0000f",
        scales: "1111753f00000000bcbb3b3f11111d3f2222423fc2bd707d7777b53f8988783f000000003333333f1111553f66\
                 667e3f00000000c2bd707d2222f43f000000004444443f33334b3f7777813f000000000000a43fcdcca43f0000\
                 0000dedd5d3f55556d3f33334b3fc2bd707d4444f83f55550d3f00000000abaaaa3e8988a83d8988183f000000\
                 00abaa6a3f",
        zero_points: "00070f0950f0f008050fa780f0700f0f0f00",
    },
];

/// Checksums of codes, scales and zero points, of float32 and of float16.
const LARGE: &[(BlockLayout, Bits, bool, [u64; 2])] = &[
    (BlockLayout::MatMulNBits, Bits::Two, true, [0x12e00d46cb8189e2, 0x12e00d46cb8189e2]),
    (BlockLayout::MatMulNBits, Bits::Two, false, [0x18df63ffbd605fd2, 0x8c9c029f5ddd20b5]),
    (BlockLayout::MatMulNBits, Bits::Four, true, [0x1c95a03487231a95, 0x1c95a03487231a95]),
    (BlockLayout::MatMulNBits, Bits::Four, false, [0x83006bd2b65b22c5, 0x53af287b79f76b2d]),
    (BlockLayout::MatMulNBits, Bits::Eight, true, [0x25ea94a613cf4a6f, 0x25ea94a613cf4a6f]),
    (BlockLayout::MatMulNBits, Bits::Eight, false, [0x880bc29e488cbfa8, 0xc68fefd2e6ef08c7]),
    (BlockLayout::Qdq, Bits::Four, true, [0x045f748dad77ecbc, 0x045f748dad77ecbc]),
    (BlockLayout::Qdq, Bits::Four, false, [0x58d034135747dfe3, 0x04e011e4ef00bbff]),
];

/// Codes of 63 weights, an odd number, in blocks of 16.
const BNB4_SMALL: [(Bnb4Type, &str); 2] = [
    (Bnb4Type::Fp4, "40f2a0d30f5c0e308080000008380000800008080b00008035062b053096a0c0"),
    (Bnb4Type::Nf4, "b74d172f74c475f77777777777f777777777777770777777fd78e07df7691737"),
];
const BNB4_ABSMAX: &str = "00c06541e6b1617fe6b1617f00006b41";

/// Checksums of codes and absmax, the same for float32 and float16.
const BNB4_LARGE: [(Bnb4Type, u64); 2] =
    [(Bnb4Type::Fp4, 0xf6df172da1edb06b), (Bnb4Type::Nf4, 0x2057ee64fb31a670)];

/// Weights whose columns are, in turn: of both signs, zeros, multiples of 1/2, positive, negative,
/// zeros with a large value, of both signs with a large negative value, and 3 and -3.
fn weights<T: Weight>(k: usize, n: usize, large: f32) -> Vec<T> {
    let mut state = 12345_u32;
    let mut all = Vec::with_capacity(k * n);
    for row in 0..k {
        for column in 0..n {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (state >> 16) as i32;
            let random = (number % 2001 - 1000) as f32 / 64.0;
            let weight = match column % 8 {
                0 => random,
                1 => 0.0,
                2 => (number % 31 - 15) as f32 / 2.0,
                3 => random.abs(),
                4 => -random.abs(),
                5 if row % 16 == 3 => large,
                5 => 0.0,
                6 if row % 16 == 5 => -large,
                6 => random,
                _ if row % 2 == 0 => 3.0,
                _ => -3.0,
            };
            all.push(T::narrow(weight));
        }
    }
    all
}

/// Codes, scales as float32, and zero points, in bytes. The memory is not zero before.
fn quantized<T: Weight>(quantizer: &BlockQuantizer, weights: &[T]) -> [Vec<u8>; 3] {
    let sizes = quantizer.sizes().unwrap();
    let mut codes = vec![0x5a; sizes.codes];
    let mut scales = vec![T::narrow(7.0); sizes.scales];
    let mut zero_points = vec![0x5a; sizes.zero_points];
    let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
    quantizer.quantize(weights, out).unwrap();
    [codes, floats(&scales), zero_points]
}

fn quantized_bnb4<T: Weight>(quantizer: &Bnb4Quantizer, weights: &[T]) -> [Vec<u8>; 2] {
    let sizes = quantizer.sizes(weights.len()).unwrap();
    let (mut codes, mut absmax) = (vec![0x5a; sizes.codes], vec![T::narrow(7.0); sizes.absmax]);
    quantizer.quantize(weights, &mut codes, &mut absmax).unwrap();
    [codes, floats(&absmax)]
}

fn floats<T: Weight>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|value| value.wide().to_le_bytes()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[test]
fn small_matrices_are_bit_identical() {
    for case in SMALL {
        let Small { layout, bits, is_symmetric, .. } = *case;
        let (k, n, block_size) = match layout {
            BlockLayout::MatMulNBits => (20, 8, 16),
            BlockLayout::Qdq => (21, 7, 5),
        };
        let quantizer = BlockQuantizer { k, n, block_size, bits, is_symmetric, layout };
        let found = quantized(&quantizer, &weights::<f32>(k, n, 3e38)).map(|bytes| hex(&bytes));
        let place = format!("{layout:?} {bits:?} symmetric {is_symmetric}");
        assert_eq!(found, [case.codes, case.scales, case.zero_points], "{place}");
    }
}

/// Several tiles, threads and a short last block.
#[test]
fn large_matrices_are_bit_identical() {
    let (k, n) = (1068, 131);
    let (wide, narrow) = (weights::<f32>(k, n, 60000.0), weights::<f16>(k, n, 60000.0));
    for (layout, bits, is_symmetric, expected) in LARGE {
        let quantizer = BlockQuantizer {
            k,
            n,
            block_size: 32,
            bits: *bits,
            is_symmetric: *is_symmetric,
            layout: *layout,
        };
        let found = [quantized(&quantizer, &wide), quantized(&quantizer, &narrow)];
        let found = found.map(|results| checksum(&results.concat()));
        assert_eq!(found, *expected, "{layout:?} {bits:?} symmetric {is_symmetric}");
    }
}

#[test]
fn signed_values_of_each_width_are_packed() {
    let table: [(Bits, f32, &[u8]); 3] = [
        (Bits::Two, 1.0, &[0b01_00_11_10]),
        (Bits::Four, 0.25, &[0xc8, 0x40]),
        (Bits::Eight, 1.0 / 64.0, &[0x80, 0xc0, 0x00, 0x40]),
    ];
    for (bits, scale, expected) in table {
        let layout = BlockLayout::Qdq;
        let quantizer = BlockQuantizer { k: 4, n: 1, block_size: 9, bits, is_symmetric: true, layout };
        let [codes, scales, _] = quantized(&quantizer, &[-2.0_f32, -1.0, 0.0, 1.0]);
        assert_eq!((codes.as_slice(), scales), (expected, floats(&[scale])), "{bits:?}");
    }
}

/// 2 bits and an odd number of columns: bytes hold values of several rows and blocks.
#[test]
fn rows_of_2_bits_return_to_the_weights() {
    let (k, n, block_size) = (13, 5, 3);
    let weights: Vec<f32> = (0..k * n).map(|index| ((index * 7 + index / 5) % 4) as f32 - 1.0).collect();
    let layout = BlockLayout::Qdq;
    let quantizer = BlockQuantizer { k, n, block_size, bits: Bits::Two, is_symmetric: false, layout };
    let [codes, scales, zero_points] = quantized(&quantizer, &weights);
    let unpacked = |bytes: &[u8], index: usize| f32::from(bytes[index / 4] >> (index % 4 * 2) & 3);
    for (index, weight) in weights.iter().enumerate() {
        let block = index / n / block_size * n + index % n;
        let scale = f32::from_le_bytes(scales[block * 4..][..4].try_into().unwrap());
        let back = (unpacked(&codes, index) - unpacked(&zero_points, block)) * scale;
        // Half a step of the largest range, from -1 to 2.
        assert!((back - weight).abs() <= 0.51, "{index}: {back} for {weight}");
    }
}

#[test]
fn fp4_and_nf4_are_bit_identical() {
    for (data_type, codes) in BNB4_SMALL {
        let quantizer = Bnb4Quantizer { block_size: 16, data_type };
        let found = quantized_bnb4(&quantizer, &weights::<f32>(9, 7, 3e38)).map(|bytes| hex(&bytes));
        assert_eq!(found, [codes, BNB4_ABSMAX], "{data_type:?}");
    }
    let (wide, narrow) = (weights::<f32>(1068, 131, 60000.0), weights::<f16>(1068, 131, 60000.0));
    for (data_type, expected) in BNB4_LARGE {
        let quantizer = Bnb4Quantizer { block_size: 64, data_type };
        let found = [quantized_bnb4(&quantizer, &wide), quantized_bnb4(&quantizer, &narrow)];
        assert_eq!(found.map(|results| checksum(&results.concat())), [expected; 2], "{data_type:?}");
    }
}

#[test]
fn empty_matrices_have_no_results() {
    for layout in [BlockLayout::MatMulNBits, BlockLayout::Qdq] {
        for (k, n) in [(0, 0), (0, 3), (3, 0)] {
            let quantizer =
                BlockQuantizer { k, n, block_size: 16, bits: Bits::Four, is_symmetric: false, layout };
            let expected = BlockSizes { weights: 0, codes: 0, scales: 0, zero_points: 0 };
            assert_eq!(quantizer.sizes().unwrap(), expected);
            quantized::<f32>(&quantizer, &[]);
        }
    }
    quantized_bnb4::<f32>(&Bnb4Quantizer { block_size: 16, data_type: Bnb4Type::Nf4 }, &[]);
}

#[test]
fn wrong_sizes_are_refused() {
    let sound = BlockQuantizer {
        k: 32,
        n: 2,
        block_size: 16,
        bits: Bits::Four,
        is_symmetric: false,
        layout: BlockLayout::MatMulNBits,
    };
    let huge = usize::MAX / 2;
    let table = [
        (BlockQuantizer { block_size: 0, ..sound }, "block size 0"),
        (BlockQuantizer { block_size: 8, ..sound }, "block size 8"),
        (BlockQuantizer { block_size: 48, ..sound }, "block size 48"),
        (BlockQuantizer { block_size: 512, ..sound }, "block size 512"),
        (BlockQuantizer { block_size: 0, layout: BlockLayout::Qdq, ..sound }, "block size 0"),
        (BlockQuantizer { k: huge, n: huge, ..sound }, "too large"),
        (BlockQuantizer { k: huge, n: huge, layout: BlockLayout::Qdq, ..sound }, "too large"),
        (BlockQuantizer { k: 31, ..sound }, "weights: 64 elements, expected 62"),
        (BlockQuantizer { bits: Bits::Two, ..sound }, "codes: 32 elements, expected 16"),
        (BlockQuantizer { block_size: 32, ..sound }, "scales: 4 elements, expected 2"),
        (BlockQuantizer { layout: BlockLayout::Qdq, ..sound }, "zero points: 3 elements, expected 2"),
    ];
    for (quantizer, expected) in table {
        let (mut codes, mut scales, mut zero_points) = ([0; 32], [0.0_f32; 4], [0; 3]);
        let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
        let error = quantizer.quantize(&[1.0; 64], out).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(expected), "{error}: not {expected}");
    }
    for (block_size, codes, absmax) in [(8, 16, 4), (512, 16, 1), (16, 15, 2), (16, 16, 3)] {
        let quantizer = Bnb4Quantizer { block_size, data_type: Bnb4Type::Fp4 };
        let error = quantizer.quantize(&[1.0_f32; 32], &mut vec![0; codes], &mut vec![0.0; absmax]);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
