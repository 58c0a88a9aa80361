//! The examples at the end of each command's help.

pub(crate) const ALL: &str = "\
Examples:
  ort                                    the demo
  ort inspect model.onnx                 which inputs a model has
  ort run model.onnx                     run once on random inputs
  ort plan model.onnx --dim batch=8      how much memory does a run take
  ort bench model.onnx --threads 2       how long does a run take
  ort train model.onnx --data train.npz  train it

Exit codes: 0 success; 1 failure, and the last line on standard error says why; 2 the command line is wrong.";

pub(crate) const DEMO: &str = "\
Example:
  ort demo";

pub(crate) const RUN: &str = "\
Examples:
  ort run model.onnx
  ort run model.onnx --dim batch=4 --seed 7
  ort run model.onnx --input image=cat.npy --outputs answers.npz
  ort run model.onnx --inputs all.npz --memory-limit 64MiB

In the FILE.npz of --outputs strings have NumPy's type <U. A sequence is NAME[0], NAME[1] and so on, \
and a map is NAME.keys and NAME.values. An optional is its value, or absent. A sparse tensor becomes dense; \
bfloat16 and 8-bit floats become float32. A value that NumPy cannot hold (a string that ends in NUL) is an \
error, and no file is written.

Output files are written whole or not at all. A symbolic link stays, and its target is replaced. For a \
device or a pipe such as /dev/stdout, the file is copied into it once it is complete.";

pub(crate) const BENCH: &str = "\
Examples:
  ort bench model.onnx
  ort bench model.onnx --dim batch=8 --threads 2 --seconds 10
  ort bench model.onnx --concurrency 4
  ort bench model.onnx --rate 6          the cost of occasional runs, 6 per second
  ort bench model.onnx --json | jq .median_ms
  ort bench model.onnx --no-mem-pattern --no-arena    without the memory plan and the arena";

pub(crate) const INSPECT: &str = "\
Examples:
  ort inspect model.onnx
  ort inspect model.onnx --graph | less
  ort inspect model.onnx --json | jq .operators";

pub(crate) const CHECK: &str = "\
Examples:
  ort check model.onnx
  ort check model.onnx --json | jq -r '.findings[].operator'";

pub(crate) const PLAN: &str = "\
Examples:
  ort plan model.onnx --dim batch=8 --dim seq=128
  ort plan model.onnx --shape image=8x3x224x224
  ort plan model.onnx --json | jq .peak_bytes
  ort plan model.onnx --dim batch=8 --svg plan.svg                     open it in a browser
  ort plan model.onnx --dim batch=1,2,4,8,16 --memory-limit 256MiB     the largest that fits
  ort plan llama --context 8192 --requests 4 --memory-limit 2GiB       a folder for ort generate

A dimension that is not given is 1. With several sizes, --json describes the largest that fits, whole or \
with a split batch, or the first if none fits. It lists all in `sweep`.";

pub(crate) const GENERATE: &str = "\
Examples:
  ort generate llama --prompt 'Once upon a time'
  ort generate llama --chat --memory-limit 2GiB                 a conversation; each line is a question
  ort generate llama --prompt Hi --temperature 0.8 --top-p 0.9 --seed 7
  ort generate llama --prompt 'One: ' --prompt 'Two: ' --json   both in one batch
  ort generate llama --memory-limit 2GiB --dry-run              the longest context that fits
  ort plan llama --context 8192 --requests 4                    the memory of four requests

The folder is one of onnxruntime-genai (genai_config.json), of optimum (config.json and model.onnx with \
past_key_values) or of Transformers.js (config.json and onnx/model.onnx), with its tokenizer.json. Text goes to \
standard output as it is generated, tokens a second and memory to standard error.

What does not fit the memory limit is refused before anything runs, with the bytes that it takes and the longest \
context that fits.";

pub(crate) const OPTIMIZE: &str = "\
Examples:
  ort optimize model.onnx smaller.onnx
  ort optimize model.onnx out.onnx --level basic
  ort optimize model.onnx out.onnx --without-rule gelu      disable a rule
  ort optimize model.onnx out.onnx --rewrites 17            stop after 17 (for bisecting)

`basic` folds constants and simplifies, for any runtime. `extended` also fuses to operators of \
com.microsoft and of newer opsets that ONNX Runtime has. The file imports the oldest opset that has all of \
its operators. Other commands take the level as --opt-level.";

pub(crate) const QUANTIZE: &str = "\
Examples:
  ort quantize model.onnx small.onnx --mode int4 --dim batch=1 --dim seq=128
  ort quantize model.onnx small.onnx --mode dynamic --inputs sample.npz
  ort quantize model.onnx small.onnx --mode static --data samples.npz --smooth auto
  ort quantize model.onnx small.onnx --mode static --data samples.npz --format qoperator
  ort quantize model.onnx small.onnx --compare --data samples.npz   the error of each output of small.onnx
  ort quantize model.onnx small.onnx --mode int4 --exclude '*/lm_head*' --exclude op:Gather
  ort quantize model.onnx small.onnx --mode int8 --dry-run          list the layers, and write nothing

Weights are read from the mapped file, and written, one at a time. The new model is loaded and run before it appears under
its name; if it fails, nothing is written. The outputs of both models on the same inputs are compared: give real ones with
--inputs or --data, because the difference on random inputs says little.";

pub(crate) const PRUNE: &str = "\
Examples:
  ort prune model.onnx sparse.onnx --sparsity 0.5 --inputs sample.npz
  ort prune model.onnx sparse.onnx --pattern 2:4 --method sparsegpt --data samples.npz
  ort prune model.onnx sparse.onnx --sparsity 0.5 --method wanda --data samples.npz --exclude '*/lm_head*'
  ort prune model.onnx sparse.onnx --sparsity 0.3 --scope row
  ort prune model.onnx small.onnx --channels 0.25 --multiple 8 --data samples.npz
  ort prune model.onnx sparse.onnx --sparsity 0.5 --dry-run          list the layers, and write nothing

Zeros save no memory and no time by themselves: the file and the run stay as they are. They help where the file is \
compressed, where a runtime has kernels for the pattern, and to see how much of a model is needed. --channels makes \
the shapes smaller: fewer weights, activations and multiplications.

--sparsity is exact: that share of the elements of each weight, rounded, is removed. Of equal elements the first ones are. \
With samples, `output error` is the error of the layer's outputs if it alone is pruned, beside that of magnitude pruning. \
The new model is loaded and run before it appears under its name; if it fails, nothing is written.";

pub(crate) const COMPILE: &str = "\
Examples:
  ort compile model.onnx model.compiled
  ort bench model.compiled                       loads without packing weights
  ort compile model.onnx half.compiled --precision bf16
  ort run model.onnx --cache DIR                 the same in a folder, for any number of models

The file holds the model with its external data, so any command takes it as its MODEL. If the settings, \
the CPU or the version differ from those that it was compiled with, a warning says so, and the weights are \
packed again.";

pub(crate) const PROFILE: &str = "\
Examples:
  ort profile model.onnx --threads 1
  ort profile model.onnx --runs 50 --nodes 20
  ort profile model.onnx --trace trace.json     open it in chrome://tracing or Perfetto";

pub(crate) const SOAK: &str = "\
Examples:
  ort soak model.onnx --cycles 50                                       is all memory freed?
  ort soak model.onnx --runs 10000                                      does it grow with the runs?
  ort soak model.onnx --runs 1000 --random-dim batch=1..8 --random-dim seq=8..511
  ort soak model.onnx --callers 64 --json | jq .peak_rss

Inputs are random; --inputs gives them if no dimension is random. Anonymous memory is what the model \
costs this process alone. Pages of files are shared, and the system drops them if others need the memory.";

pub(crate) const TRAIN: &str = "\
Examples:
  ort train model.onnx --data train.npz --validation held_out.npz --save trained.onnx
      trains all weights with AdamW on cross entropy. train.npz has an array for each input of the model, \
by name, and `labels`; the first axis counts samples: numpy.savez(\"train.npz\", image=images, labels=labels)

  ort train model.onnx --data train.npz --train 'head.*' --optimizer sgd --momentum 0.9 --lr 0.01 \\
      --schedule cosine --epochs 30 --batch 16 --accumulate 4 --memory-limit 512MiB \\
      --checkpoint run1 --checkpoint-every 100 --plot run1.svg
      trains only the weights named head.*, in updates of 64 samples with the memory of 16, and reports the \
memory of a step before the first one; the same command with --resume continues where it stopped, bit for bit

  ort train model.onnx --data train.npz --memory-opt-level 1
      recomputes the activations inside layers instead of keeping them

  ort train model.onnx --data train.npz --mixed-precision bf16
      keeps activations in 16 bits, weights and optimizer state in float32

  ort train model.onnx --data train.npz --ep cuda --ep cpu
      trains on a GPU, and runs on the CPU what the GPU does not claim

  ort train model.onnx --check --loss mse
      reports what prevents training this model

  ort train student.onnx --data with_teacher.npz --loss kl --temperature 2
      distills: `target` has the teacher's logits

Samples are shuffled in each epoch, in an order that follows from --seed. If the model's batch is \
symbolic, the last batch may be smaller.

Losses: cross-entropy takes int64 classes as `labels`; mse, l1, bce and kl compare with `target`; --loss \
output takes the model's own output.";

pub(crate) const TEST: &str = "\
Examples:
  ort test cases/
  ort test onnx/backend/test/data/node onnx/backend/test/data/simple
  ort test cases/ --rtol 1e-2 --atol 1e-4

Each test_data_set_* has input_0.pb, input_1.pb and so on for the inputs without a default in the model, \
and output_0.pb and so on. The tensors inside may name their inputs instead. A file `tol` in a case's folder \
sets its tolerance.

A file `check` marks a random output: `bernoulli [seeded] [complement]`. The output then has the type and \
shape of the expected one, its elements are 0 or 1, and over 400 runs the share of ones of each element is \
the input's probability (with `complement`, 1 minus it) within 5 standard deviations. With `seeded` two runs \
agree, and their number of ones is right within 3 standard deviations.";

pub(crate) const PROVIDERS: &str = "\
Examples:
  ort providers
  ort providers --json
  ORT_PROVIDER_PATH=/opt/npu ort providers    # with the libraries in this folder

A provider library runs the nodes that it claims: --ep ./libnpu.so --ep cpu, or its name if its folder is \
in ORT_PROVIDER_PATH. --ep optional:NAME warns and goes on if the provider cannot be used. --ep-option \
NAME.OPTION=VALUE sets an option: --ep wgpu --ep-option wgpu.memory_limit=1073741824.";
