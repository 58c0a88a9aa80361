//! Small kernels run through the functions of the driver, against plain computations.

#![allow(clippy::unwrap_used)]

use std::ffi::c_void;
use std::process::Command;
use std::ptr::null_mut;

use half::{bf16, f16};
use ort_cuda_emulator::driver::*;

mod support;
use support::{download, kernel, kernel_of, ready, upload};

#[test]
fn vectors_are_added() {
    let k = kernel(
        ".visible .entry add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) {
            .reg .pred %p<2>; .reg .f32 %f<4>; .reg .b32 %r<6>; .reg .b64 %rd<11>;
            ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c]; ld.param.u32 %r2, [n];
            mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x;
            mad.lo.s32 %r1, %r3, %r4, %r5;
            setp.ge.s32 %p1, %r1, %r2;
            @%p1 bra $L__BB0_2;
            cvta.to.global.u64 %rd4, %rd1; mul.wide.s32 %rd5, %r1, 4; add.s64 %rd6, %rd4, %rd5;
            cvta.to.global.u64 %rd7, %rd2; add.s64 %rd8, %rd7, %rd5;
            ld.global.f32 %f1, [%rd8]; ld.global.nc.f32 %f2, [%rd6]; add.f32 %f3, %f2, %f1;
            cvta.to.global.u64 %rd9, %rd3; add.s64 %rd10, %rd9, %rd5; st.global.f32 [%rd10], %f3;
        $L__BB0_2: ret; }",
        "add",
    );
    let a: Vec<f32> = (0..1000).map(|v| v as f32 * 0.37).collect();
    let b: Vec<f32> = (0..1000).map(|v| 5.0 - v as f32).collect();
    let out = upload(&vec![0f32; 1000]);
    k.run(8, 128, 0, &[upload(&a), upload(&b), out, 1000]);
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(download::<f32>(out, 1000), expected);
}

#[test]
fn a_block_is_summed_by_shuffles_and_shared_memory() {
    let k = kernel(
        ".extern .shared .align 16 .b8 dynamic[];
        .visible .entry sum(.param .u64 a, .param .u64 c) {
            .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 4 .b8 pad[12];
            ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [c];
            mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;
            ld.global.u32 %r2, [%rd1]; mov.u32 %r3, 16;
        loop:
            shfl.sync.down.b32 %r4|%p1, %r2, %r3, 31, -1;
            add.s32 %r2, %r2, %r4; shr.u32 %r3, %r3, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra.uni loop;
            mov.u32 %r5, dynamic; shr.u32 %r6, %r1, 5; shl.b32 %r7, %r6, 2; add.s32 %r7, %r7, %r5;
            and.b32 %r8, %r1, 31; setp.eq.s32 %p3, %r8, 0;
            @%p3 st.shared.u32 [%r7], %r2;
            bar.sync 0;
            setp.ne.u32 %p4, %r1, 0; @%p4 ret;
            mov.u32 %r9, 0; mov.u32 %r10, 0;
        more:
            shl.b32 %r11, %r10, 2; add.s32 %r11, %r11, %r5; ld.shared.u32 %r12, [%r11]; add.s32 %r9, %r9, %r12;
            add.s32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 8; @%p5 bra more;
            st.global.u32 [%rd2], %r9;
            red.global.add.u32 [%rd2+4], %r9; atom.global.max.s32 %r13, [%rd2+8], %r9;
            ret; }",
        "sum",
    );
    let a: Vec<u32> = (0..256).collect();
    let out = upload(&[0u32, 7, 3]);
    k.run(1, 256, 64, &[upload(&a), out]);
    assert_eq!(download::<u32>(out, 3), [32640, 32647, 32640]);
}

/// Warp 0 waits for the whole block, while the others meet at a barrier of their own first.
#[test]
fn a_named_barrier_opens_behind_an_incomplete_one_of_the_block() {
    let k = kernel(
        ".visible .entry named(.param .u64 c) {
            .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<3>; .shared .align 4 .b8 sums[4];
            ld.param.u64 %rd1, [c]; mov.u32 %r1, %tid.x; mov.u32 %r2, sums;
            setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r2], 0;
            bar.sync 0;
            setp.lt.u32 %p1, %r1, 32; @%p1 bra all;
            atom.shared.add.u32 %r3, [%r2], 1;
            bar.sync 1, 64;
            ld.shared.u32 %r3, [%r2]; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
            st.global.u32 [%rd1], %r3;
        all:
            bar.sync 0; ret; }",
        "named",
    );
    let out = upload(&[7u32; 96]);
    k.run(1, 96, 0, &[out]);
    let expected: Vec<u32> = (0..96).map(|thread| if thread < 32 { 7 } else { 64 }).collect();
    assert_eq!(download::<u32>(out, 96), expected);
}

#[test]
fn threads_take_ways_of_their_own_and_call_functions() {
    let k = kernel(
        ".func (.param .b32 out) triple(.param .b32 x) {
            .reg .b32 %r<4>; ld.param.u32 %r1, [x]; mul.lo.s32 %r2, %r1, 3; st.param.b32 [out+0], %r2; ret; }
        .const .align 4 .u32 table[3] = {100, 200, 0x12c};
        .visible .entry ways(.param .u64 c, .param .u32 n) {
            .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
            ld.param.u64 %rd1, [c]; ld.param.u32 %r7, [n]; mov.u32 %r1, %tid.x; mov.u32 %r2, 0; mov.u32 %r3, %r1;
        again:
            setp.ge.u32 %p1, %r3, %r7; @%p1 bra done;
            { .reg .b32 temp_param_reg; .param .b32 param0; st.param.b32 [param0+0], %r3; .param .b32 retval0;
              call.uni (retval0), triple, (param0); ld.param.b32 %r4, [retval0+0]; }
            and.b32 %r5, %r3, 1; setp.eq.b32 %p2, %r5, 1;
            @%p2 sub.s32 %r2, %r2, %r4;
            @!%p2 add.s32 %r2, %r2, %r4;
            add.s32 %r3, %r3, 5; bra again;
        done:
            mov.u64 %rd3, table; ld.const.u32 %r6, [%rd3+8]; add.s32 %r2, %r2, %r6;
            mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r2; ret; }",
        "ways",
    );
    let out = upload(&[0i32; 40]);
    k.run(1, 40, 0, &[out, 33]);
    let expected: Vec<i32> = (0..40)
        .map(|t| 300 + (t..33).step_by(5).map(|v| if v % 2 == 1 { -3 * v } else { 3 * v }).sum::<i32>())
        .collect();
    assert_eq!(download::<i32>(out, 40), expected);
}

#[test]
fn a_matrix_product_of_halves() {
    let k = kernel(
        ".visible .entry mm(.param .u64 a, .param .u64 b, .param .u64 c) {
            .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<9>; .shared .align 16 .b8 tile[768];
            ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
            mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.u32 %r3, tile; add.s32 %r4, %r3, %r2;
            cvt.u64.u32 %rd4, %r2; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;
            cp.async.cg.shared.global [%r4], [%rd5], 16;
            .reg .pred %p; setp.lt.u32 %p, %r1, 16;
            @%p cp.async.ca.shared.global [%r4+512], [%rd6], 16;
            cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
            and.b32 %r5, %r1, 15; shl.b32 %r6, %r5, 5; shr.u32 %r7, %r1, 4; shl.b32 %r8, %r7, 4;
            add.s32 %r9, %r6, %r8; add.s32 %r9, %r9, %r3;
            ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r9];
            shl.b32 %r14, %r5, 4; add.s32 %r14, %r14, %r3;
            ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r15, %r16}, [%r14+512];
            mov.f32 %f1, 0f3F800000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
                {%f1,%f2,%f3,%f4}, {%r10,%r11,%r12,%r13}, {%r15,%r16}, {%f1,%f2,%f3,%f4};
            shr.u32 %r20, %r1, 2; and.b32 %r21, %r1, 3; shl.b32 %r22, %r20, 5; shl.b32 %r23, %r21, 3;
            add.s32 %r24, %r22, %r23; cvt.u64.u32 %rd7, %r24; add.s64 %rd8, %rd3, %rd7;
            st.global.v2.f32 [%rd8], {%f1, %f2}; st.global.v2.f32 [%rd8+256], {%f3, %f4}; ret; }",
        "mm",
    );
    let value = |k: usize| ((k * 37 + 11) % 23) as f32 / 8.0 - 1.0;
    let a: Vec<f16> = (0..256).map(|k| f16::from_f32(value(k))).collect();
    let b: Vec<f16> = (0..128).map(|k| f16::from_f32(value(k + 400))).collect();
    let out = upload(&[0f32; 128]);
    k.run(1, 32, 0, &[upload(&a), upload(&b), out]);
    let mut expected = vec![1f32; 128];
    for row in 0..16 {
        for column in 0..8 {
            for k in 0..16 {
                expected[row * 8 + column] += a[row * 16 + k].to_f32() * b[k * 8 + column].to_f32();
            }
        }
    }
    assert_eq!(download::<f32>(out, 128), expected);
}

/// Computes `text` of %r1 = a and %r2 = b into %r3.
fn value(text: &str, a: u32, b: u32) -> u32 {
    let k = kernel(
        &format!(
            ".visible .entry one(.param .u64 c, .param .u32 a, .param .u32 b) {{
            .reg .b32 %r<9>; .reg .b16 %h<9>; .reg .f32 %f<9>; .reg .pred %p<9>; .reg .b64 %rd<9>; .reg .f64 %d<9>;
            ld.param.u64 %rd1, [c]; ld.param.u32 %r1, [a]; ld.param.u32 %r2, [b];
            mov.b32 %f1, %r1; mov.b32 %f2, %r2; {text} st.global.u32 [%rd1], %r3; ret; }}"
        ),
        "one",
    );
    let out = upload(&[0u32]);
    k.run(1, 1, 0, &[out, a.into(), b.into()]);
    download::<u32>(out, 1)[0]
}

#[test]
fn single_instructions() {
    let f = f32::to_bits;
    let cases: Vec<(&str, u32, u32, u32)> = vec![
        ("cvt.rni.s32.f32 %r3, %f1;", f(2.5), 0, 2),
        ("cvt.rzi.s32.f32 %r3, %f1;", f(-2.7), 0, -2i32 as u32),
        ("cvt.rmi.s32.f32 %r3, %f1;", f(-2.2), 0, -3i32 as u32),
        ("cvt.rpi.u32.f32 %r3, %f1;", f(-2.2), 0, 0),
        ("cvt.rzi.s32.f32 %r3, %f1;", f(f32::NAN), 0, 0),
        ("cvt.rzi.s32.f32 %r3, %f1;", f(3e10), 0, i32::MAX as u32),
        (
            "cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 %r3, %h1;",
            f(0.1),
            0,
            u32::from(f16::from_f32(0.1).to_bits()),
        ),
        ("cvt.rz.f16.f32 %h1, %f1; cvt.u32.u16 %r3, %h1;", f(1.9999), 0, 0x3FFF),
        (
            "cvt.rn.bf16.f32 %h1, %f1; cvt.u32.u16 %r3, %h1;",
            f(0.1),
            0,
            u32::from(bf16::from_f32(0.1).to_bits()),
        ),
        ("cvt.rn.f16x2.f32 %r3, %f1, %f2;", f(1.0), f(2.0), 0x3C00_4000),
        ("cvt.rn.bf16x2.f32 %r3, %f1, %f2;", f(1.0), f(2.0), 0x3F80_4000),
        ("cvt.rn.f32.s32 %f3, %r1; mov.b32 %r3, %f3;", -16_777_217i32 as u32, 0, f(-16_777_216.0)),
        ("cvt.rzi.f32.f32 %f3, %f1; mov.b32 %r3, %f3;", f(-2.7), 0, f(-2.0)),
        ("cvt.sat.f32.f32 %f3, %f1; mov.b32 %r3, %f3;", f(2.7), 0, f(1.0)),
        ("cvt.s32.s8 %r3, %r1;", 0x80, 0, 0xFFFF_FF80),
        ("cvt.sat.u8.s32 %r3, %r1;", 300, 0, 255),
        ("cvt.sat.s8.s32 %r3, %r1;", -300i32 as u32, 0, 0xFFFF_FF80),
        (
            "cvt.f64.f32 %d1, %f1; add.f64 %d1, %d1, 0d3FF0000000000000; cvt.rn.f32.f64 %f3, %d1; mov.b32 %r3, %f3;",
            f(1.5),
            0,
            f(2.5),
        ),
        ("add.rz.f32 %f3, %f1, %f2; mov.b32 %r3, %f3;", f(1.0), f(-1e-10), f(1.0) - 1),
        (
            "fma.rn.f32 %f3, %f1, %f2, 0fBF800000; mov.b32 %r3, %f3;",
            f(1.000_000_1),
            f(1.000_000_1),
            f(1.000_000_1f32.mul_add(1.000_000_1, -1.0)),
        ),
        ("min.f32 %f3, %f1, %f2; mov.b32 %r3, %f3;", f(f32::NAN), f(2.0), f(2.0)),
        (
            "max.NaN.f32 %f3, %f1, %f2; setp.nan.f32 %p1, %f3, %f3; selp.u32 %r3, 1, 0, %p1;",
            f(f32::NAN),
            f(2.0),
            1,
        ),
        ("ex2.approx.ftz.f32 %f3, %f1; mov.b32 %r3, %f3;", f(3.0), 0, f(8.0)),
        ("prmt.b32 %r3, %r1, %r2, 0x5410;", 0x1111_2222, 0x3333_4444, 0x4444_2222),
        (
            "lop3.b32 %r3, %r1, %r2, 0xFF00FF00, 0x96;",
            0x1234_5678,
            0x0F0F_0F0F,
            0x1234_5678 ^ 0x0F0F_0F0F ^ 0xFF00_FF00,
        ),
        ("bfe.s32 %r3, %r1, 4, 8;", 0xF80, 0, 0xFFFF_FFF8),
        ("bfi.b32 %r3, %r1, %r2, 8, 4;", 0xAB, 0, 0xB00),
        ("shf.l.wrap.b32 %r3, %r1, %r2, 8;", 0x1234_5678, 0xAABB_CCDD, 0xBBCC_DD12),
        ("mul.hi.u32 %r3, %r1, %r2;", 0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF_FFFE),
        ("dp4a.s32.s32 %r3, %r1, %r2, 10;", 0x01FF_0203, 0x0101_0101, 15),
        ("{ .reg .b16 a, b; mov.b32 {a, b}, %r1; mov.b32 %r3, {b, a}; }", 0x1234_5678, 0, 0x5678_1234),
        ("fma.rn.f16x2 %r3, %r1, %r2, %r1;", 0x3C00_4000, 0x4000_4000, 0x4200_4600),
        ("setp.ltu.f32 %p1|%p2, %f1, %f2; selp.u32 %r3, 5, 6, %p2;", f(f32::NAN), f(1.0), 6),
        ("setp.eq.s32 %p3, %r1, 1; setp.lt.and.s32 %p1, %r1, %r2, !%p3; selp.u32 %r3, 5, 6, %p1;", 1, 2, 6),
        ("add.cc.u32 %r4, %r1, %r2; addc.u32 %r3, 0, 0;", 0xFFFF_FFFF, 1, 1),
        ("shr.s32 %r3, %r1, %r2;", 0x8000_0000, 99, 0xFFFF_FFFF),
        ("clz.b32 %r4, %r1; popc.b32 %r5, %r2; add.u32 %r3, %r4, %r5;", 0xFF, 0x11, 26),
        ("bfind.u32 %r3, %r1;", 0x100, 0, 8),
        ("vote.sync.ballot.b32 %r3, 1, 1;", 0, 0, 1),
        ("cvt.rna.tf32.f32 %r3, %f1;", 0x3F80_1000, 0, 0x3F80_2000),
        ("atom.global.cas.b32 %r4, [%rd1], 0, 9; ld.global.u32 %r3, [%rd1];", 0, 0, 9),
        ("copysign.f32 %f3, %f1, %f2; mov.b32 %r3, %f3;", f(-1.0), f(3.0), f(-3.0)),
    ];
    for (text, a, b, expected) in cases {
        let found = value(text, a, b);
        assert_eq!(found, expected, "{text}: {found:#x} instead of {expected:#x}");
    }
}

/// NVIDIA, "PTX ISA", section on `cvt`.
#[test]
fn conversions_of_64_bits() {
    // Each from %rd2 = b << 32 | a, or from the NaN %f1 with all bits of its fraction set.
    let not_a_number = 0x7FFF_FFFF;
    let cases: [(&str, u32, u32, u32); 12] = [
        // 2^53 + 1 and 2^53 + 3 are between two numbers.
        ("cvt.rn.f64.u64 %d1, %rd2; mov.b64 {%r3, %r4}, %d1;", 1, 0x20_0000, 0),
        ("cvt.rp.f64.u64 %d1, %rd2; mov.b64 {%r3, %r4}, %d1;", 1, 0x20_0000, 1),
        ("cvt.rz.f64.s64 %d1, %rd2; mov.b64 {%r3, %r4}, %d1;", 3, 0x20_0000, 1),
        ("cvt.rm.f64.s64 %d1, %rd2; mov.b64 {%r3, %r4}, %d1;", !0, !0x20_0000, 1),
        // One below the number after 2^60, and one above what is halfway to it.
        ("cvt.rz.f32.u64 %f3, %rd2; mov.b32 %r3, %f3;", !0, 0x1000_001F, 0x5D80_0000),
        ("cvt.rn.f32.s64 %f3, %rd2; mov.b32 %r3, %f3;", 1, 0x1000_0010, 0x5D80_0001),
        ("cvt.rn.bf16.u64 %h1, %rd2; cvt.u32.u16 %r3, %h1;", 1, 0x1010_0000, 0x5D81),
        ("cvt.rzi.s64.f32 %rd2, %f1; mov.b64 {%r4, %r3}, %rd2;", not_a_number, 0, 1 << 31),
        ("cvt.rzi.u64.f32 %rd2, %f1; mov.b64 {%r4, %r3}, %rd2;", not_a_number, 0, 1 << 31),
        ("cvt.f64.f32 %d1, %f1; cvt.rzi.s32.f64 %r3, %d1;", not_a_number, 0, 1 << 31),
        ("cvt.f64.f32 %d1, %f1; cvt.rzi.u16.f64 %r3, %d1;", not_a_number, 0, 1 << 15),
        ("cvt.rzi.u32.f32 %r3, %f1;", not_a_number, 0, 0),
    ];
    for (text, a, b, expected) in cases {
        let found = value(&format!("mov.b64 %rd2, {{%r1, %r2}}; {text}"), a, b);
        assert_eq!(found, expected, "{text}: {found:#x} instead of {expected:#x}");
    }
}

/// Loops of different length, guards, two calls of one function and a table of branches, in 40
/// threads: a full warp and a part of one.
#[test]
fn lanes_that_part_meet_again() {
    const THREADS: u32 = 40;
    let k = kernel(
        ".func (.param .b32 out) triple(.param .b32 x) {
            .reg .b32 %r<3>;
            ld.param.b32 %r1, [x]; mul.lo.s32 %r2, %r1, 3; st.param.b32 [out], %r2; ret; }
        .visible .entry k(.param .u64 out) {
            .reg .pred %p<5>; .reg .b32 %r<12>; .reg .b64 %rd<4>;
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
            rem.u32 %r2, %r1, 7; rem.u32 %r3, %r1, 3;
            mov.u32 %r4, 0; mov.u32 %r5, 0;
        $L_loop:
            mad.lo.s32 %r4, %r5, %r1, %r4; add.s32 %r5, %r5, 1;
            setp.le.u32 %p1, %r5, %r2; @%p1 bra $L_loop;
            and.b32 %r6, %r1, 1; setp.eq.u32 %p2, %r6, 1;
            @%p2 add.s32 %r4, %r4, 1000;
            @!%p2 add.s32 %r4, %r4, 7;
            setp.eq.u32 %p3, %r3, 0; @!%p3 bra $L_other;
            { .param .b32 param0; st.param.b32 [param0+0], %r4; .param .b32 retval0;
              call.uni (retval0), triple, (param0); ld.param.b32 %r4, [retval0+0]; }
            bra $L_table;
        $L_other:
            add.s32 %r7, %r4, 5;
            { .param .b32 param0; st.param.b32 [param0+0], %r7; .param .b32 retval0;
              call.uni (retval0), triple, (param0); ld.param.b32 %r8, [retval0+0]; }
            sub.s32 %r4, %r8, 1;
        $L_table:
            $L_targets: .branchtargets $L_zero, $L_one, $L_two;
            brx.idx %r3, $L_targets;
        $L_zero: add.s32 %r4, %r4, 100; bra $L_end;
        $L_one: add.s32 %r4, %r4, 200; setp.eq.u32 %p4, %r1, 13; @%p4 ret; bra $L_end;
        $L_two: add.s32 %r4, %r4, 300;
        $L_end: st.global.u32 [%rd3], %r4; ret; }",
        "k",
    );
    let out = upload(&[0u32; THREADS as usize]);
    k.run(1, THREADS, 0, &[out]);
    let expected: Vec<u32> = (0..THREADS)
        .map(|t| {
            let sum: u32 = (0..=t % 7).map(|i| i * t).sum();
            let sum = sum + if t % 2 == 1 { 1000 } else { 7 };
            let sum = if t % 3 == 0 { 3 * sum } else { 3 * (sum + 5) - 1 };
            if t == 13 { 0 } else { sum + 100 * (t % 3 + 1) }
        })
        .collect();
    assert_eq!(download::<u32>(out, THREADS as usize), expected);
}

/// What threads of a warp exchange through shared memory without a barrier is found if they run one
/// after the other, and not if they run together.
#[test]
fn threads_that_run_apart_show_a_missing_barrier() {
    const APART: &str = "ORT_CUDA_EMULATOR_APART";
    let k = kernel(
        ".visible .entry k(.param .u64 out) {
            .reg .b32 %r<6>; .reg .b64 %rd<4>; .shared .align 4 .b8 s[128];
            ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;
            add.s64 %rd3, %rd1, %rd2; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;
            st.shared.u32 [%r4], %r1;
            xor.b32 %r3, %r3, 4; add.s32 %r4, %r2, %r3;
            ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd3], %r5; ret; }",
        "k",
    );
    let out = upload(&[0u32; 32]);
    k.run(1, 32, 0, &[out]);
    let neighbors: Vec<u32> = (0..32).map(|t| t ^ 1).collect();
    let found = download::<u32>(out, 32);
    if std::env::var_os(APART).is_some() {
        assert!(found[0] == !0 && found[1] == 0, "{found:?}");
        return;
    }
    assert_eq!(found, neighbors);
    for test in ["threads_that_run_apart_show_a_missing_barrier", "lanes_that_part_meet_again"] {
        let own = std::env::current_exe().unwrap();
        let status = Command::new(own).arg(test).env(APART, "1").status().unwrap();
        assert!(status.success(), "{test}");
    }
}

#[test]
fn directives_without_an_end_are_refused() {
    for text in [".entry k() { .pragma \"nounroll\"", ".entry k() { .pragma", ".section a {"] {
        assert_eq!(kernel_of("sm_80", text, "k").err(), Some(218), "{text}");
    }
}

#[test]
fn what_is_unknown_is_said_with_its_line() {
    ready();
    let text =
        c".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() {\nfrobnicate.b32 1;\nret; }";
    let (mut module, mut log) = (null_mut(), [0u8; 200]);
    let (options, values) = ([5u32, 6], [log.as_mut_ptr().cast::<c_void>(), 200 as Handle]);
    // SAFETY: all places are valid.
    let code = unsafe {
        cuModuleLoadDataEx(&raw mut module, text.as_ptr().cast(), 2, options.as_ptr(), values.as_ptr())
    };
    let log = String::from_utf8_lossy(&log);
    assert!(code == 218 && log.contains("line 5") && log.contains("frobnicate"), "{code}: {log}");
}
