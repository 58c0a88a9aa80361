"""Writes ort-generate/tests/data: tiny random decoders, and the tokens that other runtimes generate.

    python xtask/python/generation_reference.py

Needs torch, transformers, tokenizers, onnx, onnx_ir and onnxruntime-genai. The folders `llama`, `llama_int4` and
`qwen2` come from the model builder of onnxruntime-genai, which also generates their tokens. `gpt2` is a graph as
optimum exports it, with caches that grow by concatenation; its tokens come from PyTorch. `text.json` has what the
packages tokenizers and jinja2 make of texts and messages, and what the logits processors of transformers leave of
logits. Every number follows from the seeds below.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy
import onnx
import onnxruntime_genai
import tokenizers
import torch
import transformers
from onnx import TensorProto, helper, numpy_helper

HERE = pathlib.Path(__file__).resolve().parents[2]
DATA = HERE / "ort-generate" / "tests" / "data"
BUILDER = pathlib.Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
CONTEXT = 256
NEW_TOKENS = 48

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A tokenizer splits text into pieces; a model predicts the piece that follows.",
    "Memory is planned before it is used: 512 bytes here, 1024 bytes there.",
    "It's not what you'd expect, they'll say, but we've measured it twice.",
    "Größe, naïve, café: letters of other languages are several bytes each.",
]
TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}{{- '<|system|>' + messages[0]['content'].strip() + '<|end|>\\n' -}}"
    "{%- endif -%}{%- for message in messages if message['role'] != 'system' -%}"
    "{%- if message['role'] not in ['user', 'assistant'] -%}"
    "{{- raise_exception('unknown role ' ~ message['role']) -}}{%- endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}\n"
    "{% endfor -%}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(folder):
    """A byte-level BPE whose pre-tokenizer is the regular expression of Llama 3 and Qwen."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def shapes():
    return dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=320,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.3,
    )


def prompts(tokenizer):
    texts = ["The quick", "Memory is planned before it is used: 512 bytes", CORPUS[4] + " " + CORPUS[3]]
    return [tokenizer.encode(text) for text in texts] + [[0]]


def build(model, tokenizer, name, precision, options=()):
    """A folder as onnxruntime-genai's builder writes it, and the tokens that onnxruntime-genai generates from it."""
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        command = [sys.executable, str(BUILDER), "-i", source, "-o", str(folder), "-p", precision, "-e", "cpu"]
        command += ["-c", tempfile.mkdtemp()]
        if options:
            command += ["--extra_options", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    inline(folder / "model.onnx")
    runtime = onnxruntime_genai.Model(str(folder))
    answers = []
    for prompt in prompts(tokenizer):
        parameters = onnxruntime_genai.GeneratorParams(runtime)
        parameters.set_search_options(max_length=len(prompt) + NEW_TOKENS, do_sample=False)
        generator = onnxruntime_genai.Generator(runtime, parameters)
        generator.append_tokens(numpy.array(prompt, dtype=numpy.int32))
        while not generator.is_done():
            generator.generate_next_token()
        tokens = [int(token) for token in generator.get_sequence(0)]
        answers.append({"prompt": prompt, "tokens": tokens[len(prompt) :]})
    keep = {"model.onnx", "genai_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for file in folder.iterdir():
        if file.name not in keep:
            file.unlink()
    (folder / "generated.json").write_text(json.dumps(answers) + "\n")


def inline(path):
    """Moves the weights into the model's file."""
    model = onnx.load(path)
    onnx.save(model, path)
    path.with_name(path.name + ".data").unlink(missing_ok=True)


def gpt2_graph(model):
    """The graph of a GPT-2 as optimum exports it: caches grow by Concat."""
    config, weights = model.config, model.state_dict()
    heads, size = config.n_head, config.n_embd // config.n_head
    nodes, constants = [], []

    def constant(name, array):
        constants.append(numpy_helper.from_array(numpy.asarray(array), name))
        return name

    def weight(name):
        return constant(name, weights[name].detach().numpy())

    def node(op, inputs, output, **attributes):
        nodes.append(helper.make_node(op, inputs, [output] if isinstance(output, str) else output, **attributes))
        return output

    float_, long = TensorProto.FLOAT, TensorProto.INT64
    cache = ["batch_size", heads, "past_sequence_length", size]
    inputs = [
        helper.make_tensor_value_info("input_ids", long, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", long, ["batch_size", "past_sequence_length + sequence_length"]),
        helper.make_tensor_value_info("position_ids", long, ["batch_size", "sequence_length"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", float_, ["batch_size", "sequence_length", config.vocab_size])]
    node("Add", [node("Gather", [weight("transformer.wte.weight"), "input_ids"], "we"),
                 node("Gather", [weight("transformer.wpe.weight"), "position_ids"], "pe")], "h0")
    # The mask of a causal model: query i of the new tokens sees the keys up to past + i that are not padding.
    one, zero = constant("one", numpy.array(1, numpy.int64)), constant("zero", numpy.array(0, numpy.int64))
    node("Gather", [node("Shape", ["attention_mask"], "mask_shape"), one], "total")
    node("Gather", [node("Shape", ["input_ids"], "ids_shape"), one], "new")
    node("Range", [zero, "total", one], "keys")
    node("Add", [node("Range", [zero, "new", one], "queries"), node("Sub", ["total", "new"], "past")], "places")
    node("LessOrEqual", [node("Unsqueeze", ["keys", constant("ax0", [0])], "keys2"),
                         node("Unsqueeze", ["places", constant("ax1", [1])], "places2")], "causal")
    node("Unsqueeze", [node("Cast", ["attention_mask"], "present_bool", to=TensorProto.BOOL),
                       constant("ax12", [1, 2])], "present4")
    node("And", ["causal", "present4"], "seen")
    node("Where", ["seen", constant("none", numpy.float32(0)), constant("low", numpy.float32(-3.0e38))], "bias")
    split = constant("split_heads", numpy.array([0, 0, heads, size]))
    merge = constant("merge_heads", numpy.array([0, 0, config.n_embd]))
    scale = constant("scale", numpy.float32(size**-0.5))
    hidden = "h0"
    for layer in range(config.n_layer):
        at, to = f"transformer.h.{layer}.", f"l{layer}."

        def linear(x, name, out):
            node("MatMul", [x, weight(at + name + ".weight")], out + ".mm")
            return node("Add", [out + ".mm", weight(at + name + ".bias")], out)

        def norm(x, name, out):
            return node("LayerNormalization", [x, weight(at + name + ".weight"), weight(at + name + ".bias")], out,
                        epsilon=config.layer_norm_epsilon)

        parts = [to + "q", to + "k", to + "v"]
        node("Split", [linear(norm(hidden, "ln_1", to + "n1"), "attn.c_attn", to + "qkv")], parts, axis=2, num_outputs=3)
        q, k, v = (node("Transpose", [node("Reshape", [part, split], part + ".4")], part + ".t", perm=[0, 2, 1, 3])
                   for part in parts)
        for kind, new in (("key", k), ("value", v)):
            past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            inputs.append(helper.make_tensor_value_info(past, float_, cache))
            total = ["batch_size", heads, "past_sequence_length + sequence_length", size]
            outputs.append(helper.make_tensor_value_info(present, float_, total))
            node("Concat", [past, new], present, axis=2)
        node("Transpose", [f"present.{layer}.key"], to + "kt", perm=[0, 1, 3, 2])
        node("Mul", [node("MatMul", [q, to + "kt"], to + "qk"), scale], to + "scaled")
        node("Softmax", [node("Add", [to + "scaled", "bias"], to + "masked")], to + "probs", axis=-1)
        node("Transpose", [node("MatMul", [to + "probs", f"present.{layer}.value"], to + "av")], to + "avt",
             perm=[0, 2, 1, 3])
        attended = linear(node("Reshape", [to + "avt", merge], to + "flat"), "attn.c_proj", to + "o")
        hidden = node("Add", [hidden, attended], to + "h")
        wide = linear(norm(hidden, "ln_2", to + "n2"), "mlp.c_fc", to + "fc")
        node("Gelu", [wide], to + "gelu", approximate="tanh")
        hidden = node("Add", [hidden, linear(to + "gelu", "mlp.c_proj", to + "proj")], to + "h2")
    node("LayerNormalization", [hidden, weight("transformer.ln_f.weight"), weight("transformer.ln_f.bias")], "final",
         epsilon=config.layer_norm_epsilon)
    node("MatMul", ["final", constant("lm_head", weights["lm_head.weight"].detach().numpy().T.copy())], "logits")
    graph = helper.make_graph(nodes, "gpt2", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def build_gpt2(tokenizer):
    folder = DATA / "gpt2"
    shutil.rmtree(folder, ignore_errors=True)
    config = transformers.GPT2Config(
        vocab_size=320, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, n_inner=64, bos_token_id=0,
        eos_token_id=1, pad_token_id=1, initializer_range=0.3,
    )
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).eval()
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    graph = gpt2_graph(model)
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, folder / "model.onnx")
    answers = []
    for prompt in prompts(tokenizer):
        given = torch.tensor([prompt])
        done = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append({"prompt": prompt, "tokens": done[0, len(prompt) :].tolist()})
    (folder / "generated.json").write_text(json.dumps(answers) + "\n")


def texts(tokenizer):
    samples = CORPUS + ["", " ", "<|user|>Hi<|end|>", "a  b\n\n c\t", "🙂 and 漢字", "3.14159 + 2 = 5"]
    encoded = [
        {
            "text": text,
            "plain": tokenizer.encode(text, add_special_tokens=False),
            "special": tokenizer.encode(text),
            "decoded": tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True),
        }
        for text in samples
    ]
    conversations = [
        [("user", " Hello! ")],
        [("system", "Be short.\n"), ("user", "Why?"), ("assistant", "Because."), ("user", "But \"why\"?")],
    ]
    templates = [
        TEMPLATE,
        "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m['content'] }}\n{% endfor %}{{ messages | tojson }}",
        "{% for m in messages %}{% if loop.last and m.content.startswith('Hello') %}{% endif %}"
        "    {% set role = m.role.title() %}\n    {{ role }}:{{ m.content.split()[0] }}{{ eos_token }}\n{% endfor %}",
    ]
    chats = []
    for template in templates:
        for conversation in conversations:
            messages = [{"role": role, "content": content} for role, content in conversation]
            text = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
            chats.append({"template": template, "messages": messages, "text": text})
    torch.manual_seed(5)
    logits = torch.randn(1, 40) * 2
    seen = torch.tensor([[3, 7, 7, 20]])
    cases = []
    for parameters in [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.7},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0.3, "top_p": 0.05},
    ]:
        scores = logits.clone()
        for name, processor in [
            ("repetition_penalty", transformers.RepetitionPenaltyLogitsProcessor),
            ("temperature", transformers.TemperatureLogitsWarper),
            ("top_k", transformers.TopKLogitsWarper),
            ("top_p", transformers.TopPLogitsWarper),
            ("min_p", transformers.MinPLogitsWarper),
        ]:
            if name in parameters:
                scores = processor(parameters[name])(seen, scores)
        cases.append({"parameters": parameters, "probabilities": scores.softmax(-1)[0].tolist()})
    sampling = {"logits": logits[0].tolist(), "seen": seen[0].tolist(), "cases": cases}
    whole = {"encoded": encoded, "chats": chats, "sampling": sampling}
    (DATA / "text.json").write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n")


def main():
    DATA.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(folder)
    torch.manual_seed(1)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shapes())).eval()
    build(llama, tokenizer, "llama", "fp32")
    build(llama, tokenizer, "llama_int4", "int4", ["accuracy_level=1"])
    torch.manual_seed(2)
    qwen = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shapes(), tie_word_embeddings=True)).eval()
    build(qwen, tokenizer, "qwen2", "fp32")
    build_gpt2(tokenizer)
    texts(tokenizer)
    # Text files end with a newline here, which the tools above leave out.
    for path in [*DATA.glob("*/*.json"), *DATA.glob("*/*.jinja")]:
        path.write_text(path.read_text().rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
