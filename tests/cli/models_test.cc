// Bad model files: one message that names what is wrong, exit code 1, nothing on standard output, no crash.
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {
Args run_on(const std::string& model) { return {"run", "-m", model, "-q", "-p", "abc", "-n", "2", "-t", "1"}; }

TinyModel with(const std::string& tensor, const TensorMistake& mistake) {
  TinyModel model;
  model.mistakes[tensor] = mistake;
  return model;
}

TinyModel with_keys(std::function<void(MkGguf&)> more) {
  TinyModel model;
  model.more = std::move(more);
  return model;
}

TEST(CliModels, TheTinyModelItselfIsWhole) {
  EXPECT_TRUE(succeeds(longkv_program(run_on(TinyModel().write("model.gguf")))));
}

TEST(CliModels, CutAnywhereIsAnError) {
  const std::string bytes = file_bytes(TinyModel().write("model.gguf"));
  ASSERT_GT(bytes.size(), 100000u);
  std::vector<size_t> lengths = {0, 1, 3, 4, 8, 15, 23, 24, 25, bytes.size() - 4096, bytes.size() - 1};
  uint32_t state = 7;
  for (int i = 0; i < 30; ++i) {
    state = state * 1664525u + 1013904223u;
    lengths.push_back((state >> 8) % (i % 2 == 0 ? 8000 : bytes.size() - 4096));
  }
  for (const size_t n : lengths) {
    const std::string path = write_temp("cut.gguf", bytes.substr(0, n));
    EXPECT_TRUE(refuses(longkv_program(run_on(path)), 1, "cut.gguf")) << n;
    if (n % 4 == 0) {
      EXPECT_TRUE(refuses(longkv_program({"inspect", "-m", path}), 1, "cut.gguf")) << n;
    }
    if (n % 4 == 1) {
      EXPECT_TRUE(refuses(longkv_program({"tokenize", "-m", path, "-p", "x"}), 1, "cut.gguf")) << n;
    }
  }
}

TEST(CliModels, AnyByteOfTheHeaderMayBeWrong) {
  const std::string bytes = file_bytes(TinyModel().write("model.gguf"));
  uint32_t state = 1;
  for (int i = 0; i < 80; ++i) {
    std::string copy = bytes;
    for (int k = 0; k < 3; ++k) {
      state = state * 1664525u + 1013904223u;
      // The first keys, the whole header, or the records of the tensors before the data.
      const size_t range = i % 3 == 0 ? 600 : 9500;
      copy[(state >> 8) % range] = char(state >> 3);
    }
    const Outcome o = longkv_program(run_on(write_temp("wrong.gguf", copy)));
    EXPECT_EQ(o.signal, 0) << i << " " << o.err;
    EXPECT_TRUE(o.exit_code == 0 || o.exit_code == 1) << i << " exit " << o.exit_code << " " << o.err;
    EXPECT_EQ(o.err.find("internal"), std::string::npos) << i << " " << o.err;
    if (o.exit_code == 1) {
      EXPECT_NE(o.err.find("error: "), std::string::npos) << i;
    }
  }
}

TEST(CliModels, WhatIsNoModelFileIsNamed) {
  EXPECT_TRUE(refuses(longkv_program(run_on(temp_path("absent.gguf"))), 1, "absent.gguf"));
  EXPECT_TRUE(refuses(longkv_program(run_on(std::filesystem::temp_directory_path().string())), 1, "not a regular"));
  EXPECT_TRUE(refuses(longkv_program(run_on("/dev/null")), 1, "not a regular file"));
  const std::string fifo = temp_path("fifo.gguf");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_TRUE(refuses(longkv_program(run_on(fifo)), 1, "not a regular file"));
  EXPECT_TRUE(refuses(longkv_program(run_on(write_temp("text.gguf", "this is no model, only some text"))), 1, "GGUF"));
}

TEST(CliModels, HostileHeaders) {
  const auto refused = [](const MkGguf& file, const std::string& message) {
    for (const Args& args : {run_on(file.write("hostile.gguf")), Args{"inspect", "-m", temp_path("hostile.gguf")}}) {
      EXPECT_TRUE(refuses(longkv_program(args), 1, message)) << message;
    }
  };
  MkGguf version;
  version.version = 99;
  refused(version, "99");
  MkGguf tensors;
  tensors.tensor_count = uint64_t(1) << 60;
  refused(tensors, "hostile.gguf");
  MkGguf pairs;
  pairs.pair_count = uint64_t(1) << 60;
  refused(pairs, "hostile.gguf");
  MkGguf text;
  text.raw_pair("general.architecture", uint32_t(GgufType::kString), Bytes().number(uint64_t(1) << 40).str());
  refused(text, "hostile.gguf");
  MkGguf array;
  array.raw_pair("x", uint32_t(GgufType::kArray), Bytes().array(GgufType::kU64, uint64_t(1) << 61).str());
  refused(array, "hostile.gguf");
  MkGguf wraps;
  wraps.raw_record("w", 0, {1152, (uint64_t(1) << 42) + 1}, 0);
  refused(wraps, "'w'");
  MkGguf outside;
  outside.raw_record("w", 0, {32, 2}, uint64_t(1) << 62);
  refused(outside, "'w'");
  MkGguf twice;
  twice.u32("a", 1).u32("a", 2);
  refused(twice, "'a'");
}

TEST(CliModels, WrongTensorsAreNamed) {
  struct Case {
    TinyModel model;
    std::string message;
  };
  TensorMistake missing, narrow, deep, tall, unknown_type, short_vector;
  missing.missing = true;
  narrow.dims = {64, 63};
  deep.dims = {64, 32, 2};
  tall.dims = {64, 200};
  unknown_type.raw_type = 77;
  short_vector.dims = {63};
  const Case cases[] = {
      {with("blk.0.attn_q.weight", missing), "tensor 'blk.0.attn_q.weight' is missing"},
      {with("output_norm.weight", missing), "tensor 'output_norm.weight' is missing"},
      {with("token_embd.weight", missing), "tensor 'token_embd.weight' is missing"},
      {with("blk.1.attn_q.weight", narrow), "tensor 'blk.1.attn_q.weight' has shape [64, 63, 1, 1], expected [64, 64]"},
      {with("blk.1.attn_output.weight", deep), "tensor 'blk.1.attn_output.weight' has shape"},
      {with("token_embd.weight", tall), "200"},
      {with("blk.1.ffn_gate.weight", missing), "tensor 'blk.1.ffn_gate.weight' is missing"},
      {with("output.weight", tall), "tensor 'output.weight' has shape"},
      {with("blk.0.ffn_norm.weight", short_vector), "tensor 'blk.0.ffn_norm.weight' has 63 values, expected 64"},
      {with("blk.0.ffn_up.weight", unknown_type), "'blk.0.ffn_up.weight'"},
  };
  for (const Case& c : cases) EXPECT_TRUE(refuses(longkv_program(run_on(c.model.write("bad.gguf"))), 1, c.message));
}

TEST(CliModels, WrongKeysAreNamed) {
  struct Case {
    TinyModel model;
    std::string message;
  };
  std::vector<Case> cases;
  cases.push_back({TinyModel(), "model family 'lyama' is not known"});
  cases.back().model.architecture = "lyama";
  cases.push_back({TinyModel(), "no-such-pre"});
  cases.back().model.pre = "no-such-pre";
  for (const int64_t blocks : {int64_t(0), int64_t(-1), int64_t(513), int64_t(1) << 31}) {
    cases.push_back({TinyModel(), blocks == 513 ? "tensor 'blk.2.attn_" : "block_count"});
    cases.back().model.blocks = blocks;
  }
  cases.push_back({TinyModel(), "2147483648"});
  cases.back().model.eos_id = int64_t(1) << 31;
  cases.push_back({with_keys([](MkGguf& f) { f.string("llama.rope.scaling.type", "spiral"); }), "spiral"});
  cases.push_back({with_keys([](MkGguf& f) { f.f32("llama.rope.freq_base", NAN); }), "rope.freq_base"});
  cases.push_back({with_keys([](MkGguf& f) { f.u32("llama.rope.dimension_count", 4096); }), "rope.dimension_count"});
  for (const Case& c : cases) EXPECT_TRUE(refuses(longkv_program(run_on(c.model.write("bad.gguf"))), 1, c.message));
}

// Numbers that the arithmetic takes over: a wrong one would end as wrong text.
TEST(CliModels, NumbersOutOfRangeAreNamed) {
  for (const char* key : {"attention.scale", "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base",
                          "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_slow"}) {
    for (const double value : {-1.0, 1e300}) {
      const std::string full = std::string("llama.") + key;
      const std::string path = with_keys([&](MkGguf& f) { f.f64(full, value); }).write("bad.gguf");
      EXPECT_TRUE(refuses(longkv_program(run_on(path)), 1, "key '" + full + "' is ")) << value;
    }
  }
  TinyModel base;
  base.epsilon = -1.0f;
  EXPECT_TRUE(refuses(longkv_program(run_on(base.write("bad.gguf"))), 1, "layer_norm_rms_epsilon' is -1; expected"));
  // As other programs read it.
  const std::string usual = with_keys([](MkGguf& f) { f.f32("llama.attention.scale", 0.0f); }).write("usual.gguf");
  const Args answer = {"-q", "--raw", "-p", "abc", "-n", "4", "--temp", "0", "-t", "1"};
  const auto out = [&](const std::string& path) {
    Args args = {"run", "-m", path};
    args.insert(args.end(), answer.begin(), answer.end());
    return longkv_program(args).out;
  };
  EXPECT_EQ(out(usual), out(TinyModel().write("plain.gguf")));
}

TEST(CliModels, WhatNobodyReadsIsNotSilent) {
  struct Case {
    std::function<void(MkGguf&)> key;
    std::string setting;
  };
  const Case changes[] = {
      {[](MkGguf& f) { f.f32("llama.attention.clamp_kqv", 8.0f); }, "setting 'llama.attention.clamp_kqv' is 8"},
      {[](MkGguf& f) { f.f32("llama.logit_scale", 2.0f); }, "setting 'llama.logit_scale' is 2"},
      {[](MkGguf& f) { f.f64("llama.residual_scale", 0.5); }, "setting 'llama.residual_scale' is 0.5"},
      {[](MkGguf& f) { f.string("llama.embedding_scale", "x"); }, "setting 'llama.embedding_scale' is no number"},
      {[](MkGguf& f) { f.boolean("llama.attention.causal", false); }, "setting 'llama.attention.causal' is 0"},
  };
  for (const Case& c : changes) {
    EXPECT_TRUE(refuses(longkv_program(run_on(with_keys(c.key).write("bad.gguf"))), 1, c.setting));
  }
  const std::string neutral = with_keys([](MkGguf& f) {
                                f.f32("llama.logit_scale", 1.0f).f32("llama.attention.clamp_kqv", 0.0f);
                                f.boolean("llama.attention.causal", true).u32("llama.vocab_size", 261);
                              }).write("neutral.gguf");
  EXPECT_TRUE(longkv_program(run_on(neutral)).err.empty());
  const Case notices[] = {
      {[](MkGguf& f) { f.u32("llama.attention.sliding_window", 64).u32("llama.new_thing", 1); },
       "2 settings of the model file are not used by longkv: 'llama.attention.sliding_window', 'llama.new_thing'"},
      {[](MkGguf& f) { f.u32("llama.vocab_size", 77); }, "'llama.vocab_size' is 77, but the embedding has 261 rows"},
  };
  for (const Case& c : notices) {
    const std::string path = with_keys(c.key).write("noted.gguf");
    const Outcome loose = longkv_program(run_on(path));
    EXPECT_TRUE(succeeds(loose));
    EXPECT_NE(loose.err.find(c.setting), std::string::npos) << loose.err;
    EXPECT_TRUE(refuses(longkv_program(join(run_on(path), {"--strict"})), 2, c.setting));
  }
}

// Tensors that some models have and others lack: not some of a model's layers, and not where a family needs them.
TEST(CliModels, LayersAreAlike) {
  const auto biased = [](const std::string& name) {
    return with_keys([&](MkGguf& f) { f.f32_tensor(name, {64}, std::vector<float>(64, 0.1f)); });
  };
  EXPECT_TRUE(refuses(longkv_program(run_on(biased("blk.0.attn_q.bias").write("bad.gguf"))), 1,
                      "tensor 'blk.1.attn_q.bias' is missing, which earlier layers have"));
  EXPECT_TRUE(refuses(longkv_program(run_on(biased("blk.1.post_ffw_norm.weight").write("bad.gguf"))), 1,
                      "tensor 'blk.1.post_ffw_norm.weight' is there, which earlier layers have none of"));
  for (const auto& [family, tensor] :
       {std::pair{"qwen2", "blk.0.attn_q.bias"}, {"qwen3", "blk.0.attn_q_norm.weight"}}) {
    TinyModel model;
    model.architecture = family;
    EXPECT_TRUE(refuses(longkv_program(run_on(model.write("bad.gguf"))), 1,
                        std::string("tensor '") + tensor + "' is missing; models of " + family + " have it"));
  }
  const std::string zero = with_keys([](MkGguf& f) {
                             f.f32_tensor("rope_freqs.weight", {16}, std::vector<float>(16, 0.0f));
                           }).write("bad.gguf");
  EXPECT_TRUE(refuses(longkv_program(run_on(zero)), 1, "tensor 'rope_freqs.weight' holds 0; expected positive"));
}

TEST(CliModels, AVocabularyAloneTokenizesButDoesNotRun) {
  const std::string path = TinyBpe({"a b"}).file().write("vocabulary.gguf");
  EXPECT_EQ(longkv_program({"tokenize", "-m", path, "-p", "abc", "--ids", "--no-bos"}).out, "256 99\n");
  EXPECT_TRUE(refuses(longkv_program(run_on(path)), 1, "model family 'none' is not known"));
  const std::string unknown = TinyBpe({"a b"}).file("no-such-pre").write("unknown.gguf");
  EXPECT_TRUE(refuses(longkv_program({"tokenize", "-m", unknown, "-p", "ab"}), 1, "no-such-pre"));
  EXPECT_TRUE(succeeds(longkv_program({"tokenize", "-m", unknown, "-p", "ab", "--override-pre", "gpt-2"})));
  TinySentencePiece pieces({"ab"});
  EXPECT_TRUE(succeeds(longkv_program({"tokenize", "-m", pieces.file(true).write("pieces.gguf"), "-p", "ab"})));
  EXPECT_TRUE(refuses(
      longkv_program({"tokenize", "-m", temp_path("pieces.gguf"), "-p", "ab", "--override-pre", "qwen2", "--strict"}),
      2, "--override-pre is ignored"));
  pieces.scores.pop_back();
  EXPECT_TRUE(refuses(longkv_program({"tokenize", "-m", pieces.file(true).write("pieces.gguf"), "-p", "ab"}), 1,
                      "tokenizer.ggml.scores describes 259 tokens"));
  // What a file lacks is the file's fault, not the user's.
  const std::string nothing = MkGguf().write("nothing.gguf");
  EXPECT_TRUE(refuses(longkv_program(run_on(nothing)), 1, "key 'general.architecture' is missing"));
  EXPECT_TRUE(refuses(longkv_program({"tokenize", "-m", nothing, "-p", "ab"}), 1,
                      "nothing.gguf: key 'tokenizer.ggml.model' is missing"));
  EXPECT_TRUE(refuses(longkv_program(run_on(MkGguf().string("general.architecture", "llama").write("nothing.gguf"))), 1,
                      "is missing"));
}

TEST(CliModels, NumbersThatAreNotFiniteAreReported) {
  const std::string text = write_temp("score.txt", std::string(300, 'b'));
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const char* tensor : {"blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight",
                               "blk.1.attn_norm.weight", "output_norm.weight"}) {
      TensorMistake mistake;
      mistake.first_value = value;
      const std::string path = with(tensor, mistake).write("nan.gguf");
      EXPECT_TRUE(refuses(longkv_program(run_on(path)), 1, "not finite numbers")) << tensor << value;
      EXPECT_TRUE(refuses(longkv_program({"ppl", "-m", path, "-q", "-f", text, "-c", "64"}), 1, "not finite"))
          << tensor << value;
    }
  }
}

}  // namespace
}  // namespace longkv::test
