// `longkv eval` as a user meets it: results that survive a kill, and messages for what cannot be.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string needle() { return repo_model("needle-10m-128k-f16.gguf"); }

std::string fresh_dir(const std::string& name) {
  const std::string dir = temp_path(name);
  fs::remove_all(dir);
  return dir;
}

std::vector<Json> lines_of(const std::string& dir) {
  std::vector<Json> lines;
  std::istringstream in(file_bytes(dir + "/samples.jsonl"));
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  return lines;
}

// Everything but what a clock measures.
std::string comparable(std::vector<Json> lines) {
  std::vector<std::string> texts;
  for (Json& j : lines) {
    for (const char* timed : {"prefill_seconds", "seconds_per_token"}) j.erase(timed);
    texts.push_back(j.dump());
  }
  std::sort(texts.begin(), texts.end());
  std::string all;
  for (const std::string& t : texts) all += t + "\n";
  return all;
}

Args needle_run(const std::string& dir) {
  return {"eval",
          "-m",
          needle(),
          "-t",
          "2",
          "--tasks",
          "passkey,niah_single_1",
          "--lengths",
          "640",
          "--samples",
          "2",
          "-o",
          dir,
          "--kv",
          "full,quest:budget=256,snapkv:budget=256"};
}

TEST(CliEval, AKilledRunGoesOnWithoutLossOrRepetition) {
  const std::string whole = fresh_dir("eval_whole"), killed = fresh_dir("eval_killed");
  const Outcome once = longkv_program(needle_run(whole));
  ASSERT_TRUE(succeeds(once));
  EXPECT_NE(once.out.find("| quest:budget=256"), std::string::npos) << once.out;
  // 2 tasks x 2 samples x 3 recipes, and one noise row a task.
  ASSERT_EQ(lines_of(whole).size(), 14u);
  for (const Json& j : lines_of(whole)) {
    for (const char* field : {"task", "length", "kv", "seed", "index", "score", "text"}) EXPECT_TRUE(j.contains(field));
    EXPECT_EQ(j["question"], "hidden");
    EXPECT_LE(j["prompt_tokens"].get<int>() + j["new_tokens"].get<int>(), 640);
  }
  for (const int kill : {1, 3}) {
    ProgramInput input;
    input.signal = SIGKILL;
    const std::string mark = std::to_string(kill) + " of 4 prompts";
    input.signal_when = [mark](const Outcome& o) { return o.err.find(mark) != std::string::npos; };
    const Outcome o = longkv_program(needle_run(killed), input);
    EXPECT_EQ(o.signal, SIGKILL);
    // A line that the kill tore.
    std::ofstream(killed + "/samples.jsonl", std::ios::app) << "{\"suite\":\"lon";
  }
  const Outcome resumed = longkv_program(needle_run(killed));
  ASSERT_TRUE(succeeds(resumed));
  EXPECT_NE(resumed.err.find("the line is removed"), std::string::npos) << resumed.err;
  EXPECT_EQ(comparable(lines_of(killed)), comparable(lines_of(whole)));
  // Again: nothing is left to do, and more recipes or samples only add.
  const std::string before = file_bytes(killed + "/samples.jsonl");
  ASSERT_TRUE(succeeds(longkv_program(needle_run(killed))));
  EXPECT_EQ(file_bytes(killed + "/samples.jsonl"), before);
  Args more = needle_run(killed);
  more.back() += ",q8";
  ASSERT_TRUE(succeeds(longkv_program(more)));
  const std::string after = file_bytes(killed + "/samples.jsonl");
  EXPECT_EQ(after.substr(0, before.size()), before);
  EXPECT_EQ(lines_of(killed).size(), 18u);
  EXPECT_TRUE(fs::exists(killed + "/summary.csv"));
  const std::string page = file_bytes(killed + "/report.html");
  EXPECT_NE(page.find("<svg"), std::string::npos);
  EXPECT_EQ(page.find("src="), std::string::npos) << "the page must not need anything else";
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_TRUE(fs::exists(killed + "/plots/tasks-640.svg"));
  // Without a model, from the lines alone.
  fs::remove(killed + "/report.html");
  fs::remove(killed + "/summary.csv");
  const Outcome again = longkv_program({"eval", "--report", "-o", killed});
  ASSERT_TRUE(succeeds(again));
  EXPECT_EQ(file_bytes(killed + "/report.html"), page);
  EXPECT_NE(again.out.find("| quest:budget=256"), std::string::npos) << again.out;
}

TEST(CliEval, PromptsAreThoseThatArePlayed) {
  const std::string dir = fresh_dir("eval_prompts"), file = temp_path("eval_prompts.jsonl");
  const Args run = {"eval",      "-m",  needle(),    "-t", "2", "--tasks", "passkey,niah_single_1",
                    "--lengths", "640", "--samples", "2"};
  Args write = run, play = run;
  write.insert(write.end(), {"--prompts", file});
  play.insert(play.end(), {"-o", dir, "--kv", "full", "--noise", "0"});
  ASSERT_TRUE(succeeds(longkv_program(write)));
  ASSERT_TRUE(succeeds(longkv_program(play)));
  std::istringstream in(file_bytes(file));
  const std::vector<Json> played = lines_of(dir);
  ASSERT_EQ(played.size(), 4u);
  size_t i = 0;
  for (std::string line; std::getline(in, line); ++i) {
    const Json j = Json::parse(line);
    ASSERT_LT(i, played.size());
    for (const char* same :
         {"task", "length", "index", "depth", "prompt_hash", "document_tokens", "references", "metric"}) {
      EXPECT_EQ(j[same], played[i][same]) << same;
    }
    EXPECT_EQ(j["ids"].size(), played[i]["prompt_tokens"].get<size_t>());
  }
  EXPECT_EQ(i, 4u);
}

// Several prompts at a time, whose recipes decode in step, give what one after the other gives: answers, divergence,
// masses, rows and bytes.
TEST(CliEval, JobsChangeNothingButTime) {
  const auto run = [](const std::string& dir, const std::string& jobs) {
    // Recipes that share the reading, one that reads alone, one that evicts while decoding, ragged heads, encodings.
    const Outcome o = longkv_program(
        {"eval",
         "-m",
         needle(),
         "-t",
         "3",
         "--jobs",
         jobs,
         "--tasks",
         "passkey,niah_single_1,perplexity",
         "--lengths",
         "640",
         "--samples",
         "2",
         "-o",
         dir,
         "--noise",
         "0",
         "--kv-check",
         "3",
         "--kv",
         "quest:budget=256,snapkv:budget=256,streaming:budget=256,adakv:budget=256,ktransformers:block=32,budget=256,"
         "onebit:budget=256,kivi4,think,retroinfer:budget=256,prefill=a_shape(threshold=64),twilight"});
    EXPECT_TRUE(succeeds(o));
    return o;
  };
  const std::string one = fresh_dir("eval_one_job"), three = fresh_dir("eval_three_jobs");
  run(one, "1");
  const Outcome o = run(three, "3");
  EXPECT_NE(o.out.find("Times are of 3 prompts at once"), std::string::npos) << o.out;
  const auto without_jobs = [](std::vector<Json> lines) {
    for (Json& j : lines) j.erase("jobs");
    return comparable(std::move(lines));
  };
  ASSERT_EQ(lines_of(one).size(), 72u);
  EXPECT_EQ(without_jobs(lines_of(one)), without_jobs(lines_of(three)));
  for (const Json& j : lines_of(three)) {
    EXPECT_EQ(j["jobs"], 3);
    EXPECT_EQ(j["read_on"], "CPU");
    EXPECT_GT(j["seconds_per_token"].get<double>(), 0) << j["kv_label"];
  }
  const Outcome many = longkv_program({"eval", "-m", needle(), "-t", "2", "--jobs", "3", "-o", one});
  EXPECT_EQ(many.exit_code, 2);
  EXPECT_NE(many.err.find("--jobs 3 share 2 threads"), std::string::npos) << many.err;
}

// Recipes that answer shortly must not stand alone where a run was stopped: their answers are often the wrong ones.
TEST(CliEval, AStoppedPromptLeavesNoSelection) {
  const std::string dir = fresh_dir("eval_stopped");
  ProgramInput input;
  input.signal = SIGINT;
  input.signal_when = [](const Outcome& o) { return o.err.find("2 of 12 prompts") != std::string::npos; };
  const Outcome o = longkv_program({"eval", "-m", needle(), "-t", "2", "--jobs", "2", "--tasks",
                                    "passkey,niah_single_1", "--lengths", "640", "--samples", "6", "-o", dir, "--noise",
                                    "0", "--kv", "quest:budget=256,streaming:budget=128,onebit:budget=256,q8"},
                                   input);
  EXPECT_EQ(o.exit_code == 1 || o.signal == SIGINT, true) << o.err;
  std::map<std::string, int> recipes;
  for (const Json& j : lines_of(dir)) ++recipes[j["task"].get<std::string>() + j["index"].dump()];
  EXPECT_LT(recipes.size(), 12u) << "it was not stopped in time";
  for (const auto& [prompt, n] : recipes) EXPECT_TRUE(n == 1 || n == 5) << prompt << ": " << n;
}

TEST(CliEval, MassesOfHeadsAverageToThoseOfLayers) {
  const std::string dir = fresh_dir("eval_heads");
  ASSERT_TRUE(
      succeeds(longkv_program({"eval", "-m", needle(), "-t", "2", "--tasks", "vt", "--lengths", "1K", "--samples", "1",
                               "-o", dir, "--kv", "streaming:budget=256", "--noise", "0", "--kv-check", "2"})));
  for (const Json& j : lines_of(dir)) {
    if (j["kv_label"] == "full") continue;
    const auto layers = j["layer_mass"].get<std::vector<double>>(), heads = j["head_mass"].get<std::vector<double>>();
    ASSERT_EQ(layers.size(), 6u);
    ASSERT_EQ(heads.size(), 12u);
    bool apart = false;
    for (size_t l = 0; l < layers.size(); ++l) {
      EXPECT_NEAR((heads[2 * l] + heads[2 * l + 1]) / 2, layers[l], 1e-4);
      apart = apart || std::abs(heads[2 * l] - heads[2 * l + 1]) > 1e-3;
    }
    EXPECT_TRUE(apart) << "two heads never see the same";
  }
}

TEST(CliEval, TheNoiseRowIsFullAttentionToTheBit) {
  const std::string dir = fresh_dir("eval_noise");
  ASSERT_TRUE(succeeds(longkv_program({"eval", "-m", needle(), "-t", "2", "--tasks", "vt", "--lengths", "1K",
                                       "--samples", "1", "-o", dir, "--kv", "full"})));
  const std::vector<Json> lines = lines_of(dir);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1]["kv"], "full@threads=1");
  EXPECT_EQ(lines[0]["text"], lines[1]["text"]);
  EXPECT_EQ(lines[0]["answer_hash"], lines[1]["answer_hash"]);
  // Compared over every token that the first one was fed, not with itself.
  EXPECT_EQ(lines[0]["compared"], lines[1]["compared"]);
  EXPECT_EQ(lines[1]["kl_max"], 0.0);
}

TEST(CliEval, BothHarnessesNameThemselves) {
  for (const std::string question : {"hidden", "seen"}) {
    const std::string dir = fresh_dir("eval_" + question);
    const Outcome o =
        longkv_program({"eval", "-m", needle(), "-t", "1", "--tasks", "passkey", "--lengths", "512", "--samples", "1",
                        "-o", dir, "--kv", "streaming:budget=128", "--noise", "0", "--question", question});
    ASSERT_TRUE(succeeds(o));
    EXPECT_NE(o.out.find("Question " + question), std::string::npos) << o.out;
    for (const Json& j : lines_of(dir)) {
      EXPECT_EQ(j["question"], question);
      EXPECT_EQ(j["sparse"], j["kv_label"] == "full" ? "none" : question == "seen" ? "answer" : "question, answer");
      // The question's tokens are compared too where they are decoded under the recipe.
      EXPECT_EQ(j["compared"].get<int>() > 30, question == "hidden") << j.dump();
    }
  }
}

TEST(CliEval, WhatDoesNotFitIsSkippedAndCounted) {
  const std::string dir = fresh_dir("eval_skipped");
  const Outcome o =
      longkv_program({"eval", "-m", needle(), "-t", "2", "--tasks", "passkey", "--lengths", "128,1K", "-c", "512",
                      "--samples", "2", "-o", dir, "--kv", "quest:budget=256", "--noise", "0"});
  EXPECT_EQ(o.exit_code, 1) << "nothing was answered";
  EXPECT_NE(o.err.find("results were skipped"), std::string::npos) << o.err;
  ASSERT_EQ(lines_of(dir).size(), 8u);
  for (const Json& j : lines_of(dir)) EXPECT_NE(j["skipped"], "") << j.dump();
  EXPECT_NE(o.out.find("skipped"), std::string::npos) << o.out;
}

// A length beyond all memory is compared with the context before a prompt is made.
TEST(CliEval, LengthsBeyondTheContextCostNothing) {
  const std::string dir = fresh_dir("eval_beyond");
  const Args run = {"eval",    "-m",        needle(),        "-t",        "2", "--tasks",
                    "passkey", "--lengths", "512,99999999G", "--samples", "1"};
  Args play = run, write = run;
  play.insert(play.end(), {"-o", dir, "--kv", "full", "--noise", "0"});
  write.insert(write.end(), {"--prompts", temp_path("eval_beyond.jsonl")});
  ASSERT_TRUE(succeeds(longkv_program(play)));
  ASSERT_EQ(lines_of(dir).size(), 2u);
  EXPECT_EQ(longkv_program(write).exit_code, 2);
}

TEST(CliEval, MistakesAreSaidAndNothingIsWritten) {
  const std::string dir = fresh_dir("eval_bad");
  const auto run = [&](Args more) {
    Args args = {"eval", "-m", needle()};
    args.insert(args.end(), more.begin(), more.end());
    return longkv_program(args);
  };
  EXPECT_TRUE(refuses(run({"-o", dir, "--tasks", "pass_key"}), 2, "task 'pass_key' is not known"));
  EXPECT_TRUE(refuses(run({"-o", dir, "--samples", "0"}), 2, "--samples"));
  EXPECT_TRUE(refuses(run({"-o", dir, "--kv", "qest"}), 2, "qest"));
  EXPECT_TRUE(refuses(run({"-o", dir, "--lengths", "8X"}), 2, "--lengths '8X'"));
  EXPECT_TRUE(refuses(run({"-o", dir, "--depths", "50,101"}), 2, "--depths '101'"));
  EXPECT_TRUE(refuses(run({"-o", dir, "--tasks", "cwe"}), 2, "was not trained for cwe"));
  EXPECT_TRUE(refuses(run({"--tasks", "vt"}), 2, "-o names the folder"));
  EXPECT_TRUE(refuses(run({"-o", dir, "--haystack", temp_path("absent.txt")}), 1, "No such file"));
  EXPECT_TRUE(refuses(run({"-o", "/proc/longkv", "--tasks", "vt", "--lengths", "1K"}), 1, "cannot create the folder"));
  EXPECT_TRUE(refuses(longkv_program({"eval", "-o", dir}), 2, "-m names the model"));
  EXPECT_FALSE(fs::exists(dir));
  const Outcome tasks = longkv_program({"eval", "--list-tasks"});
  EXPECT_TRUE(succeeds(tasks));
  EXPECT_NE(tasks.out.find("kv_retrieval"), std::string::npos);
}

TEST(CliEval, ResultsOfAnotherRunAreLeftAlone) {
  const std::string dir = fresh_dir("eval_other");
  const Args args = {"eval",      "-m", needle(), "-t", "2",    "--tasks", "vt",      "--lengths", "1K",
                     "--samples", "1",  "-o",     dir,  "--kv", "full",    "--noise", "0"};
  ASSERT_TRUE(succeeds(longkv_program(args)));
  const std::string before = file_bytes(dir + "/samples.jsonl");
  EXPECT_TRUE(refuses(longkv_program(join(args, {"--seed", "2"})), 2, "\"seed\" is 1 there and 2 now"));
  EXPECT_TRUE(refuses(longkv_program(join(args, {"--question", "seen"})), 2, "\"question\""));
  EXPECT_EQ(file_bytes(dir + "/samples.jsonl"), before);
}

TEST(CliEval, ABenchmarksOwnFilesAreAnswered) {
  std::string text;
  for (int i = 0; i < 3; ++i) {
    text += Json{{"context", "Line " + std::to_string(i) + " of a text."},
                 {"question", "\nWhat is it? It is"},
                 {"answer_prefix", ""},
                 {"answer", {"a"}},
                 {"task", "own"},
                 {"max_new_tokens", 4}}
                .dump() +
            "\n";
  }
  const std::string file = write_temp("own.jsonl", text), dir = fresh_dir("eval_data");
  const Args args = {"eval", "-m", needle(), "-t",   "1",  "--data",  file, "--samples",
                     "2",    "-o", dir,      "--kv", "q8", "--noise", "0"};
  const Outcome o = longkv_program(args);
  ASSERT_TRUE(succeeds(o));
  ASSERT_EQ(lines_of(dir).size(), 4u);
  EXPECT_EQ(lines_of(dir)[0]["suite"], "kvpress");
  EXPECT_EQ(lines_of(dir)[0]["task"], "own");
  EXPECT_NE(o.out.find("Unlike full attention in question, answer: q8"), std::string::npos) << o.out;
  const std::string damaged = write_temp("damaged.jsonl", text + "{\"context\": \n");
  EXPECT_TRUE(refuses(longkv_program({"eval", "-m", needle(), "--data", damaged, "-o", dir + "2"}), 1,
                      "line 4 (byte " + std::to_string(text.size()) + ")"));
}

TEST(CliEval, AFullDiskStopsTheRunAndKeepsWholeLines) {
  const std::string dir = fresh_dir("eval_full");
  ProgramInput input;
  input.file_limit = 4096;
  const Outcome o = longkv_program(needle_run(dir), input);
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_NE(o.err.find("samples.jsonl"), std::string::npos) << o.err;
  const std::string text = file_bytes(dir + "/samples.jsonl");
  EXPECT_FALSE(text.empty());
  EXPECT_EQ(text.back(), '\n');
  ASSERT_TRUE(succeeds(longkv_program(needle_run(dir))));
  EXPECT_EQ(lines_of(dir).size(), 14u);
}

}  // namespace
}  // namespace longkv::test
