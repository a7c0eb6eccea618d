#!/usr/bin/env python3
"""Runs clients that people use against a running `longkv serve`:

  tests/server/clients.py LONGKV MODEL [--only curl,openai,llm,lm-eval,schemathesis,schemathesis-tools] [--python PYTHON] [--examples 50]

curl, the `openai` package, `llm` (through extra-openai-models.yaml), lm-eval's `local-completions` over a task of its own that needs no
network, and schemathesis over /openapi.json, a second time with a chat template that has tools. PYTHON is one whose environment has these packages:
  python3 -m venv clients && clients/bin/pip install openai llm schemathesis "lm-eval[api]" transformers gguf torch
What is not installed is skipped and said. Prints one line for each client; the exit status is 1 if one failed."""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

# Products of fp32 add in another order where a prompt is cut elsewhere; rows of the cache that then round to the next f16 (2^-11) move
# logits of about 20 by as much.
LIKELIHOOD_BOUND = 1e-2

HERE = pathlib.Path(__file__).resolve().parent


class Skip(Exception):
    pass


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **more)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout[-60000:]}\n{done.stderr[-6000:]}")
    return done.stdout


@contextlib.contextmanager
def serving(options, folder, *flags):
    """A server's address while it runs."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    slots = tempfile.mkdtemp(dir=folder)
    server = subprocess.Popen([options.longkv, "serve", "-m", options.model, "--port", str(port), "-c", "2048", "-np", "2",
                               "--slot-save-path", slots, "-q", *flags], stdout=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(base + "/health").close()
                break
            except OSError:
                time.sleep(0.1)
        yield base
        assert server.poll() is None, "the server ended"
    finally:
        server.terminate()
        server.wait()


def tool(options, name):
    beside = pathlib.Path(options.python).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise Skip(f"{name} is not installed")
    return found


def curl(options, base, folder):
    program = tool(options, "curl")
    body = json.dumps({"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0})
    whole = json.loads(run([program, "-sf", base + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]))
    streamed = run([program, "-sfN", base + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d",
                    body[:-1] + ', "stream": true}'])
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                   for line in streamed.splitlines() if line.startswith("data: {"))
    assert text == whole["choices"][0]["message"]["content"], (text, whole)
    # A large body asks for leave first.
    large = json.dumps({"prompt": "word " * 500, "max_tokens": 1})
    run([program, "-sf", "-H", "Expect: 100-continue", "-H", "Content-Type: application/json", base + "/v1/completions", "-d", large])
    return "whole, streamed, with Expect: 100-continue"


def openai(options, base, folder):
    if subprocess.run([options.python, "-c", "import openai"], capture_output=True, check=False).returncode != 0:
        raise Skip("the Python has no openai package")
    assert run([options.python, str(HERE / "openai_client.py"), base + "/v1"]).endswith("OK\n")
    return "chat, streams, log probabilities, JSON, errors"


def llm(options, base, folder):
    program = tool(options, "llm")
    with open(os.path.join(folder, "extra-openai-models.yaml"), "w") as file:
        for name, more in (("local", ""), ("local-text", "  completion: true\n")):
            file.write(f"- model_id: {name}\n  model_name: {name}\n  api_base: {base}/v1\n{more}")
    env = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    flags = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
    streamed = run([program, "-m", "local", "Name a colour.", *flags], env=env)
    whole = run([program, "-m", "local", "--no-stream", "Name a colour.", *flags], env=env)
    assert streamed.strip() and streamed == whole, (streamed, whole)
    assert run([program, "-m", "local", "-s", "Answer in one word.", "Name a colour.", *flags], env=env).strip()
    assert run([program, "-c", "Another one.", *flags], env=env).strip(), "a conversation goes on"
    assert run([program, "-m", "local-text", "The river runs", *flags], env=env).strip()
    return "streamed and whole, a system prompt, a second turn, text completion"


def lm_eval_asks(program, base, folder):
    env = {**os.environ, "HF_HOME": folder + "/hf", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    run([program, "--model", "local-completions", "--model_args",
         f"model=model,base_url={base}/v1/completions,tokenizer={folder}/tokenizer,num_concurrent=2,max_length=1024",
         "--include_path", folder, "--tasks", "choices,words,rolling", "--batch_size", "1", "--log_samples", "--output_path", folder + "/out"],
        env=env)


def lm_eval(options, base, folder):
    program = tool(options, "lm_eval")
    # The tokenizer of the model file, as Transformers reads it.
    run([options.python, "-c", "import sys; from transformers import AutoTokenizer as T; p = sys.argv[1].rsplit('/', 1); "
         "T.from_pretrained(p[0], gguf_file=p[1]).save_pretrained(sys.argv[2])", os.path.abspath(options.model), folder + "/tokenizer"])
    items = [("The capital of France is", [" Paris", " a banana"], 0), ("Two plus two is", [" purple", " four"], 1),
             ("Cats and dogs are", [" animals", " numbers"], 0), ("Water is made of hydrogen and", [" oxygen", " bicycle"], 0),
             ("The opposite of hot is", [" Monday", " cold"], 1), ("Monday, Tuesday,", [" Wednesday", " elephant"], 0)]
    with open(os.path.join(folder, "items.jsonl"), "w") as file:
        for question, choices, right in items:
            file.write(json.dumps({"question": question, "choices": choices, "right": right, "answer": choices[right]}) + "\n")
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/items.jsonl\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n"
    with open(os.path.join(folder, "choices.yaml"), "w") as file:
        file.write("task: choices\noutput_type: multiple_choice\n" + common + "doc_to_choice: '{{choices}}'\ndoc_to_target: right\n"
                   "target_delimiter: ''\nmetric_list:\n  - metric: acc\n")
    with open(os.path.join(folder, "words.yaml"), "w") as file:
        file.write("task: words\noutput_type: generate_until\n" + common + "doc_to_target: '{{answer}}'\ngeneration_kwargs:\n"
                   "  until: ['.', '\\n']\n  max_gen_toks: 8\n  temperature: 0\nmetric_list:\n  - metric: exact_match\n")
    with open(os.path.join(folder, "rolling.yaml"), "w") as file:
        file.write("task: rolling\noutput_type: loglikelihood_rolling\n" + common.replace("'{{question}}'", "''") +
                   "doc_to_target: '{{question}}{{answer}}'\nmetric_list:\n  - metric: word_perplexity\n")
    # Products in fp32: with int8 ones a log likelihood depends in the third digit on how a short prompt is cut.
    with serving(options, folder, "--prefill-type", "f32", "--alias", "model") as base:
        lm_eval_asks(program, base, folder)
    with open(next(pathlib.Path(folder, "out").rglob("results*.json"))) as file:
        results = json.load(file)["results"]
    assert results["choices"]["acc,none"] >= 5 / 6, results
    assert 1 < results["rolling"]["word_perplexity,none"] < 1e6, results
    # Beside `longkv score`, which goes no way over HTTP: every log likelihood, every answer.
    logged = {}
    for task in ("choices", "words", "rolling"):
        with open(next(pathlib.Path(folder, "out").rglob(f"samples_{task}_*.jsonl"))) as file:
            logged[task] = [json.loads(line) for line in file]
    asked, found = [], []
    for sample in logged["choices"]:
        for arguments, answer in zip(sample["arguments"].values(), sample["filtered_resps"]):
            asked.append({"prompt": arguments["arg_0"], "continuation": arguments["arg_1"]})
            found.append(float(answer[0]))
    for sample in logged["rolling"]:
        asked.append({"text": sample["arguments"]["gen_args_0"]["arg_0"]})
        found.append(float(sample["filtered_resps"][0]))
    for sample in logged["words"]:
        asked.append({"prompt": sample["arguments"]["gen_args_0"]["arg_0"], "max_tokens": 8, "stop": [".", "\n"]})
        found.append(sample["filtered_resps"][0])
    lines = run([options.longkv, "score", "-m", options.model, "-c", "1024", "-q", "--prefill-type", "f32"], input="".join(json.dumps(a) + "\n" for a in asked))
    scored = [json.loads(line) for line in lines.splitlines()]
    assert len(scored) == len(found), lines
    far = 0
    for question, score, over_http in zip(asked, scored, found):
        if "max_tokens" in question:
            assert score["text"] == over_http, (question, score, over_http)
        else:
            far = max(far, abs(score["log_likelihood"] - over_http))
    assert far < LIKELIHOOD_BOUND, (far, asked, scored, found)
    return (f"choices: accuracy {results['choices']['acc,none']:.2f}; {len(found)} numbers and answers as `longkv score` gives them "
            f"(largest difference of a log likelihood {far:.1e})")


# A template that lists tools and writes calls as Hermes and Qwen do, for a model of ChatML's special tokens.
TOOL_TEMPLATE = """{%- for tool in tools or [] %}{{ '<|im_start|>system\n' if loop.first }}{{ tool | tojson }}
{{ '<|im_end|>\n' if loop.last }}{%- endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""


def described(options, folder, server_flags, paths):
    """schemathesis over a server whose answers are short: most of those that it asks for go to the context's end."""
    program = tool(options, "schemathesis")
    # 504 is the answer to a request whose own time limit is over, and a full queue's is 503. Of what is written as described 422 refuses
    # what contradicts itself, which a description cannot exclude.
    config = os.path.join(folder, "schemathesis.toml")
    with open(config, "w") as file:
        file.write('[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 503, 504]\n'
                   '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", "3xx", 401, 403, 404, 409, 422, 429, "5xx"]\n')
    with serving(options, folder, "--allow-kv", "quest", "--metrics", "-n", "16", *server_flags) as own:
        out = run([program, "--config-file", config, "run", own + "/openapi.json", "--max-examples", str(options.examples), "--seed", "2",
                   "--workers", "2", "--request-timeout", "60", "--no-color", *paths], cwd=folder)
    return "; ".join([line.strip() for line in out.splitlines() if "generated" in line or "passed" in line][-2:])


def schemathesis(options, base, folder):
    return described(options, folder, (), ())


def schemathesis_tools(options, base, folder):
    with open(os.path.join(folder, "tools.jinja"), "w") as file:
        file.write(TOOL_TEMPLATE)
    return described(options, folder, ("--chat-template-file", os.path.join(folder, "tools.jinja")), ("--include-path-regex", "chat|template"))


CLIENTS = {"curl": curl, "openai": openai, "llm": llm, "lm-eval": lm_eval, "schemathesis": schemathesis,
           "schemathesis-tools": schemathesis_tools}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("longkv")
    p.add_argument("model")
    p.add_argument("--only", default=",".join(CLIENTS))
    p.add_argument("--python", default=os.environ.get("LONGKV_PYTHON", sys.executable))
    p.add_argument("--examples", type=int, default=50, help="that schemathesis tries of every operation")
    o = p.parse_args()
    failed = False
    folder = tempfile.mkdtemp(prefix="longkv-clients-")
    try:
        with serving(o, folder, "--allow-kv", "quest", "--metrics") as base:
            for name in o.only.split(","):
                place = os.path.join(folder, name)
                os.mkdir(place)
                try:
                    print(f"{name}: passed: {CLIENTS[name](o, base, place)}", flush=True)
                except Skip as reason:
                    print(f"{name}: skipped: {reason}", flush=True)
                except Exception as e:
                    failed = True
                    print(f"{name}: FAILED: {e}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failed else 0)


main()
