//! The examples at the end of each command's help.

pub(crate) const ALL: &str = "\
Examples:
  ort                                    the demo
  ort inspect model.onnx                 which inputs a model has
  ort run model.onnx                     does it run? On inputs that are made up
  ort plan model.onnx --dim batch=8      how much memory would that take
  ort bench model.onnx --threads 2       how long does it take
  ort train model.onnx --data train.npz  train it

Exit codes: 0 done; 1 it failed, and the last line on standard error says why; 2 the command line is wrong.";

pub(crate) const DEMO: &str = "\
Example:
  ort demo";

pub(crate) const RUN: &str = "\
Examples:
  ort run model.onnx
  ort run model.onnx --dim batch=4 --seed 7
  ort run model.onnx --input image=cat.npy --outputs answers.npz
  ort run model.onnx --inputs all.npz --memory-limit 64MiB

In FILE.npz of --outputs strings are NumPy's texts (<U), a sequence is NAME[0], NAME[1] and so on, a map is NAME.keys and
NAME.values, an optional is what it holds or not there, and a sparse tensor is dense; bfloat16 and 8-bit floats become
float32. Values that NumPy cannot hold (a text that ends in a zero) are an error, and no file is written.

Output files are written whole or not at all. A symbolic link stays, and the file that it leads to is replaced; into a
device or a pipe such as /dev/stdout the file is copied once it is complete.";

pub(crate) const BENCH: &str = "\
Examples:
  ort bench model.onnx
  ort bench model.onnx --dim batch=8 --threads 2 --seconds 10
  ort bench model.onnx --concurrency 4
  ort bench model.onnx --rate 6          what runs cost that are called now and then
  ort bench model.onnx --json | jq .median_ms
  ort bench model.onnx --no-mem-pattern --no-arena    what the memory plan and the arena give";

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
  ort plan model.onnx --dim batch=1,2,4,8,16 --memory-limit 256MiB     which is the largest that fits

A dimension that is not given counts as 1. With several sizes, --json describes the largest that fits, or the first where
none does, and lists all in `sweep`.";

pub(crate) const OPTIMIZE: &str = "\
Examples:
  ort optimize model.onnx smaller.onnx
  ort optimize model.onnx out.onnx --level basic
  ort optimize model.onnx out.onnx --without-rule gelu      leave a rule out
  ort optimize model.onnx out.onnx --rewrites 17            stop after 17: to find the one that does harm

`basic` folds constants and simplifies, for any runtime; `extended` also fuses, into operators of com.microsoft and of
newer operator sets, as far as ONNX Runtime has them; the file imports the oldest operator set that has them all.
Other commands take the same as --opt-level.";

pub(crate) const COMPILE: &str = "\
Examples:
  ort compile model.onnx model.compiled
  ort bench model.compiled                       loads without packing anything
  ort compile model.onnx half.compiled --precision bf16
  ort run model.onnx --cache DIR                 the same, file by file in a folder, for any number of models

The file holds the model, external data included, so that any command takes it as its MODEL. Where the settings, the CPU
or the program are not those that it was compiled with, a warning says so, and the weights are packed from the model in it.";

pub(crate) const PROFILE: &str = "\
Examples:
  ort profile model.onnx --threads 1
  ort profile model.onnx --runs 50 --nodes 20
  ort profile model.onnx --trace trace.json     open it in chrome://tracing or Perfetto";

pub(crate) const SOAK: &str = "\
Examples:
  ort soak model.onnx --cycles 50                                       is everything given back?
  ort soak model.onnx --runs 10000                                      does it grow with the runs?
  ort soak model.onnx --runs 1000 --random-dim batch=1..8 --random-dim seq=8..511
  ort soak model.onnx --callers 64 --json | jq .peak_rss

Inputs are made up, or given with --inputs where no dimension is random. Memory that belongs to no file is what the
model costs this process alone; pages of files are shared and go when others need the memory.";

pub(crate) const TRAIN: &str = "\
Examples:
  ort train model.onnx --data train.npz --validation held_out.npz --save trained.onnx
      trains all weights with AdamW on cross entropy. train.npz has an array for each input of the model, by name, and
      `labels`, all with one sample per place of the first axis: numpy.savez(\"train.npz\", image=images, labels=labels)

  ort train model.onnx --data train.npz --train 'head.*' --optimizer sgd --momentum 0.9 --lr 0.01 --schedule cosine \\
      --epochs 30 --batch 16 --accumulate 4 --memory-limit 512MiB --checkpoint run1 --checkpoint-every 100 --plot run1.svg
      trains the weights named head.* only, in updates of 64 samples with the memory of 16, and says before the first
      step what a step takes; the same again with --resume goes on where it was stopped, bit for bit

  ort train model.onnx --data train.npz --memory-opt-level 1      activations between layers are computed again
  ort train model.onnx --data train.npz --mixed-precision bf16     activations of 16 bits, weights and states in float32
  ort train model.onnx --data train.npz --ep cuda --ep cpu         on a GPU, and the CPU for what it does not claim
  ort train model.onnx --check --loss mse          can this model be trained, and what does it take?
  ort train student.onnx --data with_teacher.npz --loss kl --temperature 2      `target` has the teacher's scores

Samples are shuffled anew in each epoch, in an order that follows from --seed. A last smaller batch is trained on, too, where
the model's batch is symbolic. Losses: `labels` are int64 classes of cross-entropy; `target` is what mse, l1, bce and
kl compare with; --loss output takes the model's own output.";

pub(crate) const TEST: &str = "\
Examples:
  ort test cases/
  ort test onnx/backend/test/data/node onnx/backend/test/data/simple
  ort test cases/ --rtol 1e-2 --atol 1e-4

Each test_data_set_* holds input_0.pb, input_1.pb and so on, for the inputs that have no value of their own in the
model, or named by the tensor inside, and output_0.pb and so on. A file `tol` in a case's folder sets its tolerance.

A file `check` says that an output is drawn at random: `bernoulli [seeded] [complement]`. Then the output has the
type and shape of the expected one and is 0 or 1, and over 400 runs each element is 1 as often as the input's
probability says (`complement`: 1 less it), within 5 standard deviations. With `seeded` two runs agree, and the
number of ones in them is right within 3.";

pub(crate) const PROVIDERS: &str = "\
Examples:
  ort providers
  ort providers --json
  ORT_PROVIDER_PATH=/opt/npu ort providers    # with those of the libraries in this folder

A provider library runs what it claims: --ep ./libnpu.so --ep cpu; by its name where ORT_PROVIDER_PATH has its folder.
--ep optional:NAME does without a provider that cannot be used, with a warning. --ep-option NAME.OPTION=VALUE says
something to one: --ep wgpu --ep-option wgpu.memory_limit=1073741824.";
