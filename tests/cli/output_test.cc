// What the program prints: valid JSON everywhere, only results on standard output, the same text for the same seed.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

using Json = nlohmann::json;

std::string needle() { return repo_model("needle-10m-128k-f16.gguf"); }

// Greedy, one thread, so that the output of two runs can be compared.
Args greedy_run(const std::string& model, std::initializer_list<std::string> more) {
  return join({"run", "-m", model, "-q", "-t", "1", "--temp", "0", "--ignore-eos"}, more);
}

std::string scored_text() {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "line " + std::to_string(i * 7919 % 10007) + " of the text\n";
  return write_temp("scored.txt", text);
}

void expect_fields(const Json& j, std::initializer_list<const char*> fields) {
  for (const char* field : fields) EXPECT_TRUE(j.contains(field)) << field << " is not in " << j.dump();
}

TEST(CliOutput, EveryCommandPrintsItsFieldsAsJson) {
  const std::string model = TinyModel().write("model.gguf");
  const std::string text = scored_text();
  const Json run = parsed(longkv_program(greedy_run(model, {"-p", "abc", "-n", "5", "--json"})));
  expect_fields(run, {"text", "finish", "ids", "cost"});
  EXPECT_EQ(run["ids"].size(), 5u);
  EXPECT_EQ(run["finish"], "length");
  expect_fields(run["cost"],
                {"kv", "prompt_tokens", "prompt_seconds", "prompt_tokens_per_second", "answer_tokens", "answer_seconds",
                 "answer_tokens_per_second", "first_token_seconds", "context", "tokens_held", "kv_bytes_held",
                 "rows_attended", "kv_bytes_per_token", "index_bytes_per_token", "weight_bytes_per_token", "gb_per_s",
                 "read_bandwidth_gb_per_s", "bandwidth_share"});
  EXPECT_EQ(run["cost"]["answer_tokens"], 5);
  EXPECT_EQ(run["cost"]["prompt_tokens"], 3);
  EXPECT_EQ(run["cost"]["tokens_held"], 8);

  expect_fields(parsed(longkv_program({"run", "-m", model, "--kv-explain", "--json"})), {"fits", "context"});
  const Json plan = parsed(longkv_program({"plan", "-m", needle(), "-c", "64K", "--json"}));
  expect_fields(plan, {"fits", "context", "largest_context"});
  EXPECT_EQ(plan["context"], 65536);
  const Json inspect = parsed(longkv_program({"inspect", "-m", model, "--json"}));
  expect_fields(inspect, {"version", "metadata", "tensors"});
  EXPECT_EQ(inspect["tensors"].size(), 21u);
  const Json tokens = parsed(longkv_program({"tokenize", "-m", model, "-p", "abc", "--json"}));
  expect_fields(tokens, {"n_tokens", "fingerprint", "ids", "pieces"});
  EXPECT_EQ(tokens["ids"], Json({97, 98, 99}));
  expect_fields(parsed(longkv_program({"version", "--json"})),
                {"version", "commit", "compiler", "cpu", "threads", "isa_available", "isa_selected", "kernels"});
  const Json ppl = parsed(longkv_program({"ppl", "-m", model, "-f", text, "-c", "64", "--chunks", "3", "--json"}));
  expect_fields(ppl, {"model", "kv", "n_ctx", "n_chunks", "tokens_scored", "perplexity", "perplexity_stderr"});
  EXPECT_EQ(ppl["tokens_scored"], 3 * 31);
  EXPECT_GT(ppl["perplexity"], 1.0);
}

// Reading a window as one prompt would show full attention: these recipes act on rows of the past only.
TEST(CliOutput, PerplexityOfWhatActsOnDecodingIsThatOfDecoding) {
  const std::string text = scored_text();
  const auto perplexity = [&](const std::string& kv) {
    const Json j = parsed(longkv_program(
        {"ppl", "-m", needle(), "-q", "-t", "1", "-f", text, "-c", "256", "--chunks", "1", "--kv", kv, "--json"}));
    return j.value("perplexity", 0.0);
  };
  const double full = perplexity("full"), fed = perplexity("quest:budget=2048");
  EXPECT_NEAR(fed, full, 0.01 * full) << "a budget for every row, token by token";
  for (const std::string kv : {"kivi2:window=32", "think:window=32", "q4:window=32", "streaming:budget=64"}) {
    const double found = perplexity(kv);
    EXPECT_NE(found, full) << kv;
    EXPECT_GT(std::abs(found - fed), 1e-3 * fed) << kv;
  }
}

TEST(CliOutput, NamesThatAreNotUtf8StayValidJson) {
  const std::string path = temp_path("mod\xffl.gguf");
  std::ofstream(path, std::ios::binary) << file_bytes(TinyModel().write("model.gguf"));
  for (const Args& args :
       {Args{"run", "-m", path, "-p", "x", "-n", "1", "--json"}, Args{"inspect", "-m", path, "--json"},
        Args{"bench", "-m", path, "-p", "4", "-n", "0", "-r", "1", "-o", "jsonl"}}) {
    parsed(longkv_program(args));
  }
}

TEST(CliOutput, StatsFileHoldsWhatTheRunCost) {
  const std::string stats = temp_path("stats.json");
  ASSERT_TRUE(succeeds(longkv_program(greedy_run(needle(), {"-p", "abc", "-n", "6", "--stats", stats}))));
  const Json j = Json::parse(file_bytes(stats), nullptr, false);
  ASSERT_FALSE(j.is_discarded());
  EXPECT_EQ(j["answer_tokens"], 6);
  EXPECT_GT(j["bandwidth_share"], 0.0);
}

TEST(CliOutput, VerboseChecksNameEveryLayer) {
  const Outcome o =
      longkv_program({"run", "-m", needle(), "-t", "1", "-v", "--temperature", "0", "--typical-p", "1", "--ignore-eos",
                      "-p", "abc", "-n", "4", "--kv-check", "1", "--prefill-type", "f32"});
  ASSERT_TRUE(succeeds(o));
  EXPECT_NE(o.err.find("f32 products"), std::string::npos) << o.err;
  for (int layer = 0; layer < 6; ++layer) {
    EXPECT_NE(o.err.find("layer " + std::to_string(layer) + ": captured attention mass 1.0000"), std::string::npos)
        << o.err;
  }
}

TEST(CliOutput, BenchRows) {
  const std::string model = TinyModel().write("model.gguf");
  const Args base =
      join({"bench", "-m", model, "-r", "2", "-t", "1", "-p", "8,16", "-n", "2-4*2", "-pg", "4,2"},
           {"-d", "0,32", "--kv", "full,quest:block=16,budget=256,dense_layers=1", "--prefill-type", "f32"});
  const Json rows = parsed(longkv_program(join(base, {"--json"})));
  ASSERT_EQ(rows.size(), 2u * 2 * (2 + 2 + 1));
  // llama-bench's, of the build of the source package that bench/peers fetches; then ours.
  expect_fields(rows[2], {"build_commit",   "build_number",
                          "cpu_info",       "gpu_info",
                          "backends",       "model_filename",
                          "model_type",     "model_size",
                          "model_n_params", "n_batch",
                          "n_ubatch",       "n_threads",
                          "cpu_mask",       "cpu_strict",
                          "poll",           "type_k",
                          "type_v",         "n_gpu_layers",
                          "n_cpu_moe",      "split_mode",
                          "main_gpu",       "no_kv_offload",
                          "flash_attn",     "devices",
                          "tensor_split",   "tensor_buft_overrides",
                          "load_mode",      "lazy_mode",
                          "embeddings",     "no_op_offload",
                          "no_host",        "repack",
                          "fit_target",     "fit_min_ctx",
                          "n_prompt",       "n_gen",
                          "n_depth",        "test_time",
                          "avg_ns",         "stddev_ns",
                          "avg_ts",         "stddev_ts",
                          "samples_ns",     "samples_ts"});
  expect_fields(rows[2],
                {"kv", "isa", "prefill_type", "depth_fill", "kv_bytes_per_token", "gb_per_s", "bandwidth_share"});
  EXPECT_EQ(rows[0]["backends"], "CPU");
  EXPECT_EQ(rows[0]["n_gpu_layers"], 0);
  EXPECT_EQ(rows[0]["devices"], "none");
  EXPECT_EQ(rows[0]["prefill_type"], "f32");
  EXPECT_EQ(rows[0]["n_prompt"], 8);
  EXPECT_EQ(rows[4]["n_prompt"], 4);
  EXPECT_EQ(rows[4]["n_gen"], 2);
  EXPECT_EQ(rows[5]["n_depth"], 32);
  EXPECT_EQ(rows[0]["samples_ns"].size(), 2u);
  EXPECT_GT(rows[2]["kv_bytes_per_token"], 0);
  EXPECT_NE(rows[19]["kv"], rows[0]["kv"]);

  const Outcome lines = longkv_program(join(base, {"-o", "jsonl"}));
  EXPECT_EQ(parsed_lines(lines).size(), rows.size());

  const std::string csv = longkv_program(join(base, {"-o", "csv"})).out;
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 21);
  EXPECT_EQ(csv.rfind("build_commit,build_number,cpu_info,", 0), 0u) << csv.substr(0, 80);

  const Outcome md = longkv_program(join(base, {"-q"}));
  EXPECT_TRUE(md.err.empty()) << md.err;
  EXPECT_EQ(std::count(md.out.begin(), md.out.end(), '\n'), 22);
  EXPECT_NE(md.out.find(" pp4+tg2 @ d32 "), std::string::npos) << md.out;
  for (size_t begin = 0; begin < md.out.size(); begin = md.out.find('\n', begin) + 1) {
    const std::string line = md.out.substr(begin, md.out.find('\n', begin) - begin);
    EXPECT_EQ(std::count(line.begin(), line.end(), '|'), 12) << line;
  }
  const Json random = parsed(longkv_program(
      {"bench", "-m", needle(), "-p", "0", "-n", "2", "-d", "1K", "-r", "1", "--fill", "random", "-t", "1", "--json"}));
  EXPECT_EQ(random[0]["depth_fill"], "random");
}

TEST(CliOutput, WhatDoesNotFitIsRefusedBeforeAnyWork) {
  const std::string model = TinyModel().write("model.gguf");
  for (const Args& args : {Args{"run", "-m", model, "-q", "-p", "x", "-c", "60G"},
                           Args{"chat", "-m", tiny_chat_model().write("chat.gguf"), "-q", "-c", "60G"},
                           Args{"ppl", "-m", model, "-f", scored_text(), "-q", "-c", "60G"},
                           Args{"bench", "-m", model, "-p", "0", "-n", "1", "-d", "60G", "-r", "1"}}) {
    const Outcome o = longkv_program(args);
    EXPECT_TRUE(refuses(o, 1, "more than the")) << args[0];
    EXPECT_NE(o.err.find("the largest context that fits is -c 512"), std::string::npos) << o.err;
  }
  // A plan is what was asked for, so it is printed all the same.
  const Outcome plan = longkv_program({"plan", "-m", model, "-c", "60G", "--json"});
  EXPECT_EQ(plan.exit_code, 1);
  EXPECT_EQ(Json::parse(plan.out, nullptr, false)["fits"], false) << plan.out;
  EXPECT_EQ(longkv_program({"plan", "-m", needle(), "-c", "64K", "--ram", "64M"}).exit_code, 1);
  EXPECT_EQ(longkv_program({"run", "-m", model, "--kv-explain", "-c", "60G"}).exit_code, 0) << "explains, runs nothing";
  EXPECT_TRUE(refuses(longkv_program({"bench", "-m", temp_path("absent.gguf"), "-o", "json"}), 1, "absent.gguf"));
}

TEST(CliOutput, AnswersAloneOnStandardOutput) {
  const Args base = greedy_run(needle(), {"-p", "abc", "-n", "6"});
  const Outcome quiet = longkv_program(base);
  ASSERT_TRUE(succeeds(quiet));
  EXPECT_TRUE(quiet.err.empty()) << quiet.err;
  const Outcome loud = longkv_program({"run", "-m", needle(), "-t", "1", "--temp", "0", "--ignore-eos", "-p", "abc",
                                       "-n", "6", "-v", "--verbose-prompt", "--kv-check", "1"});
  EXPECT_EQ(loud.out, quiet.out);
  EXPECT_NE(loud.err.find("tokens/s"), std::string::npos);
  EXPECT_NE(loud.err.find("abc"), std::string::npos);
  EXPECT_EQ(longkv_program(greedy_run(needle(), {"-p", "abc", "-n", "0"})).out, "\n");
  const Outcome ids = longkv_program({"tokenize", "-m", needle(), "-p", "abc", "--ids", "--no-bos"});
  EXPECT_EQ(std::count(ids.out.begin(), ids.out.end(), '\n'), 1);
  EXPECT_TRUE(ids.err.empty()) << ids.err;
}

TEST(CliOutput, ACheckPrintsMassErrorAndDivergence) {
  std::string text;
  uint32_t state = 1;
  for (int i = 0; i < 400; ++i) text += char('a' + ((state = state * 1664525u + 1013904223u) >> 16) % 26);
  const Args args = {"run",          "-m", needle(), "-t", "1", "--temp", "0",
                     "--ignore-eos", "-p", text,     "-n", "4", "--kv",   "quest:block=16,budget=128",
                     "--kv-check",   "2"};
  const Json cost = parsed(longkv_program(join(args, {"--json"})))["cost"];
  expect_fields(cost, {"checked_steps", "captured_mass", "output_error", "kl_divergence", "captured_mass_by_layer",
                       "output_error_by_layer"});
  EXPECT_EQ(cost["checked_steps"], 2);
  EXPECT_GT(cost["captured_mass"], 0.0);
  EXPECT_LT(cost["captured_mass"], 1.0);
  EXPECT_GT(cost["output_error"], 0.0);
  EXPECT_GT(cost["kl_divergence"], 0.0);
  const Outcome plain = longkv_program(args);
  const size_t at = plain.err.find("check ");
  ASSERT_NE(at, std::string::npos) << plain.err;
  const std::string line = plain.err.substr(at, plain.err.find('\n', at) - at);
  for (const char* word : {"2 steps", "captured attention mass", "output error", "KL divergence"}) {
    EXPECT_NE(line.find(word), std::string::npos) << line;
  }
}

TEST(CliOutput, TheSameSeedGivesTheSameText) {
  const auto text = [](const std::string& seed, const std::string& threads) {
    const Outcome o = longkv_program({"run", "-m", needle(), "-q", "-p", "abc", "-n", "40", "--ignore-eos", "--temp",
                                      "1.5", "-s", seed, "-t", threads});
    EXPECT_TRUE(succeeds(o));
    return o.out;
  };
  const std::string seven = text("7", "1");
  EXPECT_EQ(seven, text("7", "1"));
  EXPECT_EQ(seven, text("7", "2")) << "whatever the number of threads";
  EXPECT_NE(seven, text("8", "1"));
  const auto best = [](const std::string& temperature) {
    return longkv_program(
               {"run", "-m", needle(), "-q", "-p", "abc", "-n", "20", "--ignore-eos", "--temp", temperature, "-s", "7"})
        .out;
  };
  EXPECT_EQ(best("-1"), best("0")) << "0 and below choose the best token";
  const Args random = {"run", "-m", needle(), "-p", "abc", "-n", "40", "--ignore-eos", "--temp", "1.5"};
  const Outcome first = longkv_program(random);
  const size_t at = first.err.find("seed: ");
  ASSERT_NE(at, std::string::npos) << first.err;
  const std::string seed = first.err.substr(at + 6, first.err.find('\n', at) - at - 6);
  EXPECT_EQ(text(seed, "1"), first.out) << "a random seed is printed so that the run can be repeated";
}

TEST(CliOutput, EveryPairOfStoreTypesRuns) {
  const std::string model = TinyModel().write("model.gguf");
  const Args types = {"f32", "f16", "bf16", "q8_0", "q4_0"};
  for (const std::string& k : types) {
    for (const std::string& v : types) {
      const Outcome o = longkv_program({"run", "-m", model, "-t", "1", "--temp", "0", "-p", "abcdefgh", "-n", "3",
                                        "--ignore-eos", "-ctk", k, "-ctv", v});
      EXPECT_TRUE(succeeds(o)) << k << v;
      EXPECT_EQ(o.out.size(), 4u) << o.out;
      // The neutral type of one of two is left out.
      const std::string store = k == v       ? "store=" + k
                                : v == "f16" ? "store(k=" + k + ")"
                                : k == "f16" ? "store(v=" + v + ")"
                                             : "store(k=" + k + ",v=" + v + ")";
      EXPECT_NE(o.err.find(store), std::string::npos) << store << o.err;
    }
  }
}

TEST(CliOutput, DivergenceFromItselfIsNextToNothing) {
  const std::string model = TinyModel().write("model.gguf");
  const std::string text = scored_text();
  const std::string base = temp_path("base.logits");
  const Args ppl = {"ppl", "-m", model, "-q", "-t", "1", "--json", "--kl-divergence-base", base};
  const Json written = parsed(longkv_program(join(ppl, {"-f", text, "-c", "64", "--chunks", "4"})));
  const Json read = parsed(longkv_program(join(ppl, {"--kl-divergence"})));
  expect_fields(read, {"base_perplexity", "kl_mean", "kl_mean_stderr", "kl_median", "kl_p90", "kl_p99", "kl_p999",
                       "kl_max", "rms_delta_p", "same_top"});
  EXPECT_EQ(read["perplexity"], written["perplexity"]);
  EXPECT_LT(std::abs(double(read["kl_mean"])), 1e-6);
  EXPECT_EQ(read["same_top"], 1.0);
  EXPECT_TRUE(refuses(longkv_program(join(ppl, {"--kl-divergence", "-c", "128"})), 2, "contradicts"));
  Args other = ppl;
  other[2] = needle();
  EXPECT_TRUE(refuses(longkv_program(join(other, {"--kl-divergence"})), 2, "vocabulary"));
  const std::string bytes = file_bytes(base);
  for (const size_t n : {size_t(0), size_t(7), size_t(19), bytes.size() / 2, bytes.size() - 7}) {
    write_temp("base.logits", bytes.substr(0, n));
    EXPECT_TRUE(refuses(longkv_program(join(ppl, {"--kl-divergence"})), 1, "base.logits")) << n;
  }
}

}  // namespace
}  // namespace longkv::test
