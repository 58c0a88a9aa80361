// Runs recorded models through onnxruntime-node: element types, made and given outputs, refusals.
// Arguments: the folder of the package, and that of the recorded data.

const { join, resolve } = require("node:path");
const { readFileSync } = require("node:fs");

const [modules, data] = process.argv.slice(2);
const ort = require(resolve(modules, "onnxruntime-node"));
const model = (name) => join(data, "models", `${name}.onnx`);

let failures = 0;
let checks = 0;

function check(what, actual, expected) {
  checks += 1;
  const isWords = expected instanceof RegExp;
  const text = isWords ? String(actual) : JSON.stringify(actual, (_, value) => (typeof value === "bigint" ? Number(value) : value));
  const fits = isWords ? expected.test(text) : text === JSON.stringify(expected);
  if (!fits) {
    failures += 1;
    console.error(`${what}: ${text}, expected ${isWords ? expected : JSON.stringify(expected)}`);
  }
}

async function refusal(work) {
  try {
    await work();
    return "no error";
  } catch (error) {
    return error.message;
  }
}

const TYPES = {
  float32: [1, Float32Array], uint8: [2, Uint8Array], int8: [3, Int8Array], uint16: [4, Uint16Array],
  int16: [5, Int16Array], int32: [6, Int32Array], int64: [7, BigInt64Array], bool: [9, Uint8Array],
  float64: [11, Float64Array], uint32: [12, Uint32Array], uint64: [13, BigUint64Array],
};

async function types() {
  for (const [type, [number, List]] of Object.entries(TYPES)) {
    const numbers = [1, 0, 1, 1, 0, 0];
    const values = List.from(numbers, /64Array/.test(List.name) && /Big/.test(List.name) ? BigInt : Number);
    for (const source of [model(`identity_${number}`), readFileSync(model(`identity_${number}`))]) {
      const session = await ort.InferenceSession.create(source, { graphOptimizationLevel: "all", intraOpNumThreads: 1 });
      check(`${type} names`, [session.inputNames, session.outputNames], [["x"], ["y"]]);
      const x = new ort.Tensor(type, values, [2, 3]);
      const { y } = await session.run({ x });
      check(`${type} type`, [y.type, y.dims], [type, [2, 3]]);
      check(`${type} values`, Array.from(y.data, Number), numbers);
      const given = new ort.Tensor(type, new List(6), [2, 3]);
      await session.run({ x }, { y: given }, { logSeverityLevel: 3, tag: "a run" });
      check(`${type} given`, Array.from(given.data, Number), numbers);
    }
  }
  const session = await ort.InferenceSession.create(model("identity_8"));
  const texts = ["a", "", "ünï", "a longer string than the others", "x", "y"];
  const { y } = await session.run({ x: new ort.Tensor("string", texts, [2, 3]) });
  check("strings", y.data, texts);
}

async function refusals() {
  check("no such file", await refusal(() => ort.InferenceSession.create("/nonexistent/model.onnx")), /File doesn't exist/);
  check("garbage", await refusal(() => ort.InferenceSession.create(Buffer.from("not a model"))), /protobuf parsing failed/);
  const session = await ort.InferenceSession.create(model("add"));
  const floats = (dims) => new ort.Tensor("float32", new Float32Array(dims.reduce((a, b) => a * b, 1)), dims);
  const run = (x) => refusal(() => session.run({ x }));
  check("missing input", await refusal(() => session.run({})), /input 'x' is missing/);
  check("type", await run(new ort.Tensor("float64", new Float64Array(6), [2, 3])), /Unexpected input data type\. Actual: \(tensor\(double\)\) , expected: \(tensor\(float\)\)/);
  check("rank", await run(floats([6])), /Invalid rank for input: x Got: 1 Expected: 2/);
  check("size", await run(floats([2, 4])), /Got invalid dimensions for input: x[^]*index: 1 Got: 4 Expected: 3/);
}

types().then(refusals).then(() => {
  console.log(`${checks - failures} of ${checks} checks pass`);
  process.exit(failures ? 1 : 0);
});
