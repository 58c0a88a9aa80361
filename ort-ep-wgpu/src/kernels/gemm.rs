//! Batched, strided GEMM and GEMV with a fused epilogue.

use std::fmt::Write as _;

use ort_core::{Result, ensure, error};
use ort_gpu::gemm::{Gemm, StridedTensor};

use crate::launch::{Dispatch, OpCx, Operand, Walk};
use crate::shader::{Element, Shader};

/// The least number of workgroups that keeps a device busy with larger tiles.
const MANY: usize = 128;
/// The invocations of a workgroup of the GEMV.
const ROW_LANES: usize = 256;

/// A tensor of a GEMM, by its name in the shader.
#[derive(Clone, Debug)]
pub(super) struct NamedTensor {
    /// `a` and `b` are the operands, minus their zero points `a_zero` and `b_zero` if present. `y`
    /// is the result. Any other tensor is a term of the epilogue.
    pub(super) name: &'static str,
    pub(super) strided: StridedTensor,
}

/// A batched GEMM `y = result(a * b)`, where `result` is the epilogue.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub(super) batch: Vec<usize>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) depth: usize,
    pub(super) tensors: Vec<NamedTensor>,
    /// The uniforms of the epilogue, `p.name`.
    pub(super) numbers: Vec<(&'static str, f32)>,
    /// The body of the epilogue: it returns the result from the accumulator `sum` and, for each
    /// term `x`, `x_value`.
    pub(super) result: String,
}

/// A square tile of the result: `block` rows and columns, `depth` steps at a time. Each invocation
/// accumulates `4 * quads` rows and as many columns.
#[derive(Clone, Copy, Debug)]
struct GemmTile {
    block: usize,
    depth: usize,
    quads: usize,
}

/// A larger tile reads less for each multiplication.
const LARGE: GemmTile = GemmTile { block: 128, depth: 8, quads: 2 };
const MEDIUM: GemmTile = GemmTile { block: 64, depth: 8, quads: 2 };
const SMALL: GemmTile = GemmTile { block: 32, depth: 16, quads: 1 };
/// The steps that are unrolled; a loop runs over the groups of them.
const WRITTEN_OUT: usize = 4;

impl NamedTensor {
    /// Whether it is a term of the epilogue.
    fn is_term(&self) -> bool {
        !matches!(self.name, "a" | "b" | "y" | "a_zero" | "b_zero")
    }
}

impl Product {
    /// Creates the plain product of two operands.
    pub(super) fn new(gemm: Gemm) -> Product {
        let Gemm { batch, rows, columns, depth, lhs, rhs, result } = gemm;
        let named = [("a", lhs), ("b", rhs), ("y", result)];
        let tensors = named.map(|(name, strided)| NamedTensor { name, strided }).to_vec();
        let result = "return y_t(sum);".to_owned();
        Product { batch, rows, columns, depth, tensors, numbers: Vec::new(), result }
    }

    /// Returns the sizes of the batch, followed by rows and columns.
    pub(super) fn whole(&self) -> Vec<usize> {
        self.batch.iter().copied().chain([self.rows, self.columns]).collect()
    }

    /// Adds a zero point or a term of the epilogue under a shape that broadcasts to the result, and
    /// returns its strides.
    pub(super) fn add(
        &mut self,
        name: &'static str,
        tensor: &Operand,
        shape: &[usize],
    ) -> Result<StridedTensor> {
        let strided = StridedTensor::broadcast(name, tensor, shape, &self.whole())?;
        self.tensors.push(NamedTensor { name, strided: strided.clone() });
        Ok(strided)
    }

    /// Returns the dispatches that compute it.
    pub(super) fn dispatches(mut self, cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
        let mut sizes = self.batch.clone();
        sizes.extend([self.rows, self.columns]);
        if sizes.contains(&0) {
            return Ok(Vec::new());
        }
        for part in &self.tensors {
            let count = part.strided.tensor.count();
            // Shaders index elements with 32 bits.
            ensure!(u32::try_from(count).is_ok(), NotImplemented, "{} has {count} elements", part.name);
        }
        let walk = self.fold()?;
        // A single column becomes a single row, so that one GEMV serves both.
        if self.columns == 1 {
            self.transpose();
        }
        let matrices = walk.sizes.iter().product::<usize>();
        let dispatch =
            if self.rows == 1 { self.row(cx, &walk, matrices)? } else { self.tiles(cx, &walk, matrices)? };
        Ok(vec![dispatch])
    }

    /// Returns the loop nest over the batch. Batch axes along which `b` is constant merge with the
    /// rows into one larger GEMM.
    fn fold(&mut self) -> Result<Walk> {
        let mut sizes = self.batch.clone();
        sizes.push(self.rows);
        let steps = |own: &NamedTensor| {
            own.strided.batch.iter().chain([&own.strided.row]).map(|step| *step as i64).collect()
        };
        let steps: Vec<Vec<i64>> = self.tensors.iter().map(steps).collect();
        let mut walk = Walk::new(&sizes, &steps);
        let rhs = self.tensors.iter().position(|own| own.name == "b");
        let rhs = rhs.ok_or_else(|| error!(Fail, "the matrix product has no right operand"))?;
        self.rows = match walk.steps.get(rhs).map(|steps| steps.last()) {
            Some(Some(0)) => walk.sizes.pop().unwrap_or(1),
            _ => 1,
        };
        let folds = walk.steps.first().is_some_and(|steps| steps.len() > walk.sizes.len());
        for (part, steps) in self.tensors.iter_mut().zip(&mut walk.steps) {
            part.strided.row = if folds { steps.pop().unwrap_or(0) as usize } else { 0 };
        }
        Ok(walk)
    }

    /// Transposes the GEMM, which swaps both operands.
    fn transpose(&mut self) {
        std::mem::swap(&mut self.rows, &mut self.columns);
        for part in &mut self.tensors {
            std::mem::swap(&mut part.strided.row, &mut part.strided.column);
            part.name = match part.name {
                "a" => "b",
                "b" => "a",
                "a_zero" => "b_zero",
                "b_zero" => "a_zero",
                other => other,
            };
        }
    }

    fn tensor(&self, name: &str) -> Result<&StridedTensor> {
        let found = self.tensors.iter().find(|own| own.name == name);
        found.map(|own| &own.strided).ok_or_else(|| error!(Fail, "a product has no tensor {name}"))
    }

    fn shader(&self, cx: &OpCx<'_>, walk: &Walk) -> Shader {
        let names: Vec<&str> = self.tensors.iter().map(|own| own.name).collect();
        let mut shader = Shader::new(cx).walk(walk, &names);
        for own in &self.tensors {
            let (name, strided) = (own.name, &own.strided);
            let tensor = &strided.tensor;
            shader = if name == "y" { shader.write(name, tensor) } else { shader.read(name, tensor) };
            shader = match name {
                "a" => shader.number("a_row", strided.row).number("a_depth", strided.depth),
                "b" => shader.number("b_column", strided.column).number("b_depth", strided.depth),
                _ => shader
                    .number(&format!("{name}_row"), strided.row)
                    .number(&format!("{name}_column"), strided.column),
            };
        }
        for (name, value) in &self.numbers {
            shader = shader.float(name, *value);
        }
        shader.number("rows", self.rows).number("columns", self.columns).number("depth", self.depth)
    }

    /// Generates what all shaders share: the accumulator type, the offsets of a batch, zero points
    /// and the epilogue.
    fn common(&self) -> Result<String> {
        let of_sides = Element::of(self.tensor("a")?.tensor.dtype)?;
        // Quantized values minus their zero points are signed, so they accumulate in `i32`.
        let sum = if of_sides.bits < 32 && of_sides.value != "f32" { "i32" } else { of_sides.value };
        let names: Vec<&str> = self.tensors.iter().map(|own| own.name).collect();
        let fields: String = names.iter().map(|name| format!("{name}: u32, ")).collect();
        let places: String = names.iter().map(|name| format!("at_{name}(batch), ")).collect();
        let mut code = format!(
            "alias sum_t = {sum};\nstruct At {{ {fields} }}\n\
             fn places(batch: u32) -> At {{ return At({places}); }}\n"
        );
        for (zero, axis) in [("a_zero", "row"), ("b_zero", "column")] {
            let value = match names.contains(&zero) {
                true => {
                    let each = |part| format!("sum_t({zero}(at.{zero} + indexes.{part} * p.{zero}_{axis}))");
                    ["x", "y", "z", "w"].map(each).join(", ")
                }
                false => String::new(),
            };
            code += &format!(
                "fn {zero}s(at: At, indexes: vec4<u32>) -> vec4<sum_t> {{ return vec4<sum_t>({value}); }}\n"
            );
        }
        let terms: Vec<&str> = self.tensors.iter().filter(|own| own.is_term()).map(|own| own.name).collect();
        let parameters: String = terms.iter().map(|name| format!(", {name}_value: {name}_t")).collect();
        let at = |name: &&str| format!("at.{name} + row * p.{name}_row + column * p.{name}_column");
        let values: String = terms.iter().map(|name| format!(", {name}({})", at(name))).collect();
        code += &format!(
            "fn result(sum: sum_t{parameters}) -> y_t {{\n{}\n}}\n\
             fn store(at: At, row: u32, column: u32, sum: sum_t) {{\n\
             set_y({}, result(sum{values}));\n}}\n",
            self.result,
            at(&"y")
        );
        Ok(code)
    }

    /// The GEMV: a workgroup computes some columns, and its invocations split the depth.
    fn row(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Dispatch> {
        let b = self.tensor("b")?;
        // If the depth of `b` is contiguous, many lanes share a column, for coalesced reads. Else
        // lanes take adjacent columns, and fewer of them split the depth.
        let near = b.depth <= b.column;
        let few = self.columns.saturating_mul(matrices) < 32 * MANY;
        let most = if near {
            64
        } else if few {
            16
        } else {
            8
        };
        let slices = self.depth.clamp(1, most).next_power_of_two();
        let columns = ROW_LANES / slices;
        let across = self.columns.div_ceil(columns);
        let shader = self
            .shader(cx, walk)
            .constant("COLUMNS", columns)
            .constant("NEAR", usize::from(near))
            .number("tiles_across", across);
        let code = self.common()? + include_str!("gemv.wgsl");
        shader.groups(matrices.saturating_mul(across), ROW_LANES, &code)
    }

    /// The tiled GEMM: the largest tile that still keeps the device busy.
    fn tiles(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Dispatch> {
        let tiles = |tile: GemmTile| [self.rows.div_ceil(tile.block), self.columns.div_ceil(tile.block)];
        let count =
            |tile: GemmTile| tiles(tile).iter().fold(matrices, |all, tiles| all.saturating_mul(*tiles));
        // Two workgroups are enough for a software adapter.
        let many = if cx.limits.is_software { 2 } else { MANY };
        let fits = |tile: &GemmTile| {
            // A tile that is less than half full wastes more than a smaller one.
            let most = tile.block / 2;
            self.rows > most && self.columns > most && count(*tile) >= many
        };
        let tile = [LARGE, MEDIUM].into_iter().find(fits).unwrap_or(SMALL);
        let [down, across] = tiles(tile);
        let shader = self
            .shader(cx, walk)
            .constant("DEPTH", tile.depth)
            .constant("QUADS", tile.block / 4)
            .number("tiles_down", down)
            .number("tiles_across", across);
        let (a, b) = (self.tensor("a")?, self.tensor("b")?);
        // The axis with the smaller step is contiguous, and adjacent lanes read along it.
        let near = [a.depth <= a.row, b.depth <= b.column];
        let code = self.common()? + include_str!("gemm.wgsl") + &tile.group(near);
        shader.groups(count(tile), tile.lanes(), &code)
    }
}

impl GemmTile {
    /// The invocations along a side of the tile.
    fn side(self) -> usize {
        self.block / 4 / self.quads
    }

    fn lanes(self) -> usize {
        self.side() * self.side()
    }

    /// Generates the function of a workgroup. `near` tells for each side whether the depth is
    /// contiguous; if so, adjacent lanes read along it. Accumulators are separate variables,
    /// because drivers may not unroll loops over arrays in registers.
    fn group(self, near: [bool; 2]) -> String {
        let (block, depth, side) = (self.block, self.depth, self.side());
        let mut code = format!(
            "fn group(index: u32, lane: u32) {{\n\
             let column0 = (index % p.tiles_across) * {block}u;\n\
             let row0 = (index / p.tiles_across % p.tiles_down) * {block}u;\n\
             let at = places(index / p.tiles_across / p.tiles_down);\n\
             let own_row = lane / {side}u;\nlet own_column = lane % {side}u;\n"
        );
        for (name, near) in [("a", near[0]), ("b", near[1])] {
            code += &self.first_loads(name, near);
        }
        let sums = (0..4 * self.quads).flat_map(|row| (0..self.quads).map(move |quad| (row, quad)));
        for (row, quad) in sums.clone() {
            code += &format!("var s{row}_{quad} = vec4<sum_t>();\n");
        }
        code += &format!("for (var k = 0u; k < p.depth; k += {depth}u) {{\n");
        code += &self.each_load(|side, load| format!("{side}_tile[{side}_to{load}] = {side}_next{load};\n"));
        code += "workgroupBarrier();\n";
        // Prefetch the next tile into registers while the current one is multiplied.
        code += &self.each_load(|side, load| {
            format!(
                "{side}_next{load} = \
                 {side}_quad({side}_from{load}, {side}_less{load}, k + {depth}u + {side}_k{load});\n"
            )
        });
        code += &format!("for (var first = 0u; first < {depth}u; first += {WRITTEN_OUT}u) {{\n");
        for step in 0..WRITTEN_OUT {
            code += &self.step(step);
        }
        code += "}\nworkgroupBarrier();\n}\n";
        for (row, quad) in sums {
            let (block, inner) = (row / 4 * side, row % 4);
            let columns = quad * side;
            code += &format!(
                "store_quad(at, row0 + 4u * (own_row + {block}u) + {inner}u, \
                 column0 + 4u * (own_column + {columns}u), s{row}_{quad});\n"
            );
        }
        code + "}\n"
    }

    /// The vectors that an invocation loads per side and tile.
    fn loads(self) -> usize {
        self.depth * self.block / 4 / self.lanes()
    }

    fn each_load(self, line: impl Fn(&str, usize) -> String) -> String {
        let sides = ["a", "b"].into_iter();
        sides
            .flat_map(|side| (0..self.loads()).map(move |load| (side, load)))
            .map(|(side, load)| line(side, load))
            .collect()
    }

    /// Declares where an invocation loads a side from and stores it to, and loads the first
    /// vectors.
    fn first_loads(self, name: &str, near: bool) -> String {
        let (axis, size) = if name == "a" { ("row", "rows") } else { ("column", "columns") };
        let (depth, quads, lanes) = (self.depth, self.block / 4, self.lanes());
        let mut code = String::new();
        for load in 0..self.loads() {
            let (quad, step) = match near {
                true => (format!("lane / {depth}u + {}u", load * lanes / depth), format!("lane % {depth}u")),
                false => (format!("lane % {quads}u"), format!("lane / {quads}u + {}u", load * lanes / quads)),
            };
            code += &format!(
                "let {name}_k{load} = {step};\n\
                 let {name}_at{load} = {quad};\n\
                 let {name}_to{load} = {name}_k{load} * PITCH + {name}_at{load};\n\
                 let {name}_four{load} = four({axis}0 + 4u * {name}_at{load}, p.{size});\n\
                 let {name}_from{load} = at.{name} + {name}_four{load} * p.{name}_{axis};\n\
                 let {name}_less{load} = {name}_zeros(at, {name}_four{load});\n\
                 var {name}_next{load} = {name}_quad({name}_from{load}, {name}_less{load}, {name}_k{load});\n"
            );
        }
        code
    }

    /// Generates one depth step: the outer product on all accumulators of an invocation.
    fn step(self, step: usize) -> String {
        let side = self.side();
        let mut code = String::from("{\n");
        for quad in 0..self.quads {
            for (name, own) in [("a", "own_row"), ("b", "own_column")] {
                let at = quad * side;
                // Writing to a string does not fail.
                let _ = writeln!(
                    code,
                    "let {name}{quad} = {name}_tile[(first + {step}u) * PITCH + {own} + {at}u];"
                );
            }
        }
        for row in 0..4 * self.quads {
            let part = ["x", "y", "z", "w"].get(row % 4).unwrap_or(&"x");
            for quad in 0..self.quads {
                let _ = writeln!(code, "s{row}_{quad} += a{}.{part} * b{quad};", row / 4);
            }
        }
        code + "}\n"
    }
}
