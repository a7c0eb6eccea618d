// Whole models whose older rows are encoded on the card: cuts, short prompts and interrupts, beside layers with windows
// and layers in memory.
#include <cstring>
#include <fstream>
#include <iterator>

#include "cuda/card.h"
#include "cuda/card_old.h"
#include "cuda/session_pair.h"
#include "support/golden.h"
#include "support/paths.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::OnCard;
using test::random_ids;

// Prompts so short that the middle of what is held would end before what is encoded, were there no cut.
TEST(CardEncoded, AShortPromptAfterACut) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(3000, p.model->config().vocab, 21);
  const std::span<const int32_t> all(ids);
  const std::string mask = "leank:mask=" + test::repo_model("needle-10m-128k-leank70.gguf");
  for (const std::string& text : {std::string("kivi4"), std::string("store=kivi4(sink=16,window=40)"), mask + "+kivi4",
                                  std::string("quest:budget=512 + store=kivi4")}) {
    SCOPED_TRACE(text);
    const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool);
    ASSERT_TRUE(cpu && gpu);
    const double limit = text.starts_with("quest") ? 0.02 : 2e-3;  // a choice may differ
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->prefill(all.first(2500)));
      ASSERT_DONE(decode_all(*s, all.first(100)));
      ASSERT_DONE(s->truncate(2333));
      ASSERT_DONE(s->prefill(all.subspan(2700, 20)));
    }
    expect_close(p, gpu->logits(), cpu->logits(), "a short prompt", limit);
    for (Session* s : {cpu.get(), gpu.get()}) ASSERT_DONE(decode_all(*s, all.first(40)));
    expect_close(p, gpu->logits(), cpu->logits(), "decoded", limit);
  }
}

TEST(CardEncoded, AShortPromptAfterAnInterruptedOne) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(3000, p.model->config().vocab, 22);
  const std::span<const int32_t> all(ids);
  const auto plain = open_session(p.model, "kivi4", p.card, *p.pool),
             stopped = open_session(p.model, "kivi4", p.card, *p.pool);
  ASSERT_TRUE(plain && stopped);
  ASSERT_DONE(plain->prefill(all.first(1000)));
  ASSERT_DONE(stopped->prefill(all.first(1000)));
  interrupt_prompt(*stopped, all.subspan(1000, 1000));
  EXPECT_EQ(stopped->tokens(), 1000);
  for (Session* s : {plain.get(), stopped.get()}) ASSERT_DONE(s->prefill(all.subspan(2500, 20)));
  // Of half the layers up to a window's rows were encoded and came back.
  expect_close(p, stopped->logits(), plain->logits(), "a short prompt", 1e-3);
  for (Session* s : {plain.get(), stopped.get()}) ASSERT_DONE(decode_all(*s, all.first(60)));
  expect_close(p, stopped->logits(), plain->logits(), "decoded", 1e-3);
}

// The ring holds a window of rows after a cut, of which blocks are summarised when a token completes them.
TEST(CardEncoded, ACutBringsAWindowOfRowsBack) {
  LONGKV_NEED_CARD();
  ModelConfig c;
  c.layers = 1;
  c.kv_heads = 2;
  c.head_dim_k = c.head_dim_v = 64;
  const int64_t capacity = 2608, rows = 2600, cut = 2350;
  CardMemory memory(0);
  for (const char* text : {"store=kivi4(window=128)", "store=kivi2(sink=16,window=40)"}) {
    SCOPED_TRACE(text);
    const Recipe recipe = parse_recipe(text).value();
    auto made = CardOldRows::create(memory, c, recipe, capacity, 0);
    ASSERT_TRUE(made.ok()) << made.status().message();
    CardOldRows& old = **made;
    const int64_t bytes = card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, capacity);
    const OnCard raw_memory(bytes), read_memory(bytes), again_memory(bytes);
    const auto place = [&](const OnCard& m) {
      return card::place_kv(KvType::kF16, c.kv_heads, c.head_dim_k, capacity, m.data());
    };
    ASSERT_DONE(card::fill_rows(place(raw_memory), rows, 7, nullptr));
    ASSERT_DONE(old.take(0, rows, place(raw_memory), nullptr));
    old.count(rows);
    ASSERT_DONE(old.read(0, cut, place(read_memory), nullptr));
    ASSERT_DONE(old.truncate(cut, nullptr));
    EXPECT_EQ(old.end(), card::old_end(cut, recipe.store.sink, recipe.store.window));
    // As after the cut: from the ring alone.
    const card::CardKv again = place(again_memory);
    ASSERT_DONE(card::copy_rows(old.rows(0), cut - recipe.store.window, cut, again, nullptr));
    const auto want = read_memory.read<uint16_t>(bytes / 2), have = again_memory.read<uint16_t>(bytes / 2);
    for (int64_t plane = 0; plane < 2 * c.kv_heads; ++plane) {
      for (int64_t r = cut - recipe.store.window; r < cut; ++r) {
        const int64_t at = (plane * capacity + r) * c.head_dim_k;
        ASSERT_EQ(std::memcmp(&want[size_t(at)], &have[size_t(at)], size_t(c.head_dim_k) * 2), 0) << "row " << r;
      }
    }
  }
}

// A block that began before a cut is summarised from the ring: the choice is the CPU's.
TEST(CardEncoded, BlocksOverACutAsOnTheCpu) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(3000, p.model->config().vocab, 24);
  const std::string text = "index=minmax(block=64) + select=topk(budget=192,sink=0,local=0) + store=kivi4(window=128)";
  const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool);
  ASSERT_TRUE(cpu && gpu);
  for (Session* s : {cpu.get(), gpu.get()}) {
    ASSERT_DONE(s->prefill(std::span<const int32_t>(ids).first(2600)));
    ASSERT_DONE(s->truncate(2350));
  }
  double mean = 0;
  constexpr int64_t kTokens = 160;
  for (int64_t i = 0; i < kTokens; ++i) {
    ASSERT_DONE(cpu->decode(ids[size_t(i)]));
    ASSERT_DONE(gpu->decode(ids[size_t(i)]));
    mean += kl_divergence(cpu->logits().data(), gpu->logits().data(), p.model->config().vocab) / double(kTokens);
  }
  std::printf("  mean KL %.2e\n", mean);
  EXPECT_LT(mean, 2e-3);
}

std::shared_ptr<const LoadedModel> windows_but_one() {  // five layers with a window of 48, then one without
  return LoadedModel::load(test::tiny_model("gemma3-linear-softcap")).value();
}

// The same with a window in every layer: the file says that the seventh would be the first without.
std::shared_ptr<const LoadedModel> windows_everywhere() {
  std::ifstream in(test::tiny_model("gemma3-linear-softcap"), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {}), added;
  const auto number = [](auto value) { return std::string(reinterpret_cast<const char*>(&value), sizeof(value)); };
  const auto key = [&](const std::string& name, uint32_t value) {
    added += number(uint64_t(name.size())) + name + number(uint32_t(4)) + number(value);
  };
  key("gemma3.attention.sliding_window_pattern", 7);
  // What follows keeps its alignment of 32 bytes.
  const size_t frame = 16;
  key(std::string(32 + (32 - (added.size() + frame) % 32) % 32, 'x'), 0);
  uint64_t keys = 0;
  std::memcpy(&keys, bytes.data() + 16, sizeof(keys));
  keys += 2;
  std::memcpy(bytes.data() + 16, &keys, sizeof(keys));
  bytes.insert(24, added);
  const std::string path = test::temp_path("windows.gguf");
  std::ofstream(path, std::ios::binary) << bytes;
  return LoadedModel::load(path).value();
}

TEST(CardEncoded, NothingIsEncodedWhereEveryLayerHasAWindow) {
  LONGKV_NEED_CARD();
  const auto model = windows_everywhere();
  for (const int64_t window : model->config().window) ASSERT_EQ(window, 48);
  Pair p;
  p.model = model;
  p.card = CardModel::load(model, {}).value();
  const auto ids = random_ids(300, model->config().vocab, 25);
  const std::span<const int32_t> all(ids);
  const auto cpu = open_session(model, "kivi4", nullptr, *p.pool), gpu = open_session(model, "kivi4", p.card, *p.pool);
  ASSERT_TRUE(cpu && gpu);
  for (Session* s : {cpu.get(), gpu.get()}) {
    ASSERT_DONE(s->prefill(all.first(250)));
    ASSERT_DONE(decode_all(*s, all.first(20)));
    ASSERT_DONE(s->prefill(all.subspan(270)));
    ASSERT_DONE(decode_all(*s, all.first(3)));
  }
  expect_close(p, gpu->logits(), cpu->logits(), "decoded", 2e-2);
  ASSERT_DONE(gpu->truncate(100));  // the card has all rows
  ASSERT_DONE(decode_all(*gpu, all.first(3)));
}

// Where layers in memory have let go of rows an interrupted prompt leaves nothing, encoded rows on the card included.
TEST(CardEncoded, AnInterruptedPromptThatLeavesNothing) {
  LONGKV_NEED_CARD();
  const auto model = windows_but_one();
  ThreadPool pool(default_threads());
  const auto card = CardModel::load(model, {0, 0, model->config().layers - 1}).value();
  const auto ids = random_ids(1500, model->config().vocab, 26);
  const std::span<const int32_t> all(ids);
  const char* const recipe = "store=kivi4(window=32)";
  const auto fresh = open_session(model, recipe, card, pool), stopped = open_session(model, recipe, card, pool);
  ASSERT_TRUE(fresh && stopped);
  ASSERT_DONE(stopped->prefill(all.first(500)));
  interrupt_prompt(*stopped, all.subspan(500, 400));
  ASSERT_EQ(stopped->tokens(), 0) << "windows let go of rows";
  for (Session* s : {fresh.get(), stopped.get()}) {
    ASSERT_DONE(s->prefill(all.subspan(900, 450)));
    ASSERT_DONE(decode_all(*s, all.first(10)));
  }
  EXPECT_EQ(relative_error(stopped->logits(), fresh->logits()), 0.0);
}

TEST(CardEncoded, ACutThatIsRefusedChangesNothing) {
  LONGKV_NEED_CARD();
  const auto model = windows_but_one();
  ThreadPool pool(default_threads());
  const auto card = CardModel::load(model, {0, 0, model->config().layers - 1}).value();
  const auto ids = random_ids(600, model->config().vocab, 27);
  const std::span<const int32_t> all(ids);
  const char* const recipe = "store=kivi4(window=32)";
  const auto plain = open_session(model, recipe, card, pool), asked = open_session(model, recipe, card, pool);
  ASSERT_TRUE(plain && asked);
  for (Session* s : {plain.get(), asked.get()}) ASSERT_DONE(s->prefill(all.first(500)));
  EXPECT_EQ(asked->truncate(100).code(), Code::kInvalidArgument);
  EXPECT_EQ(asked->tokens(), 500);
  for (Session* s : {plain.get(), asked.get()}) ASSERT_DONE(decode_all(*s, all.subspan(500, 10)));
  EXPECT_EQ(relative_error(asked->logits(), plain->logits()), 0.0);
}

// As on the CPU.
TEST(CardEncoded, NoRandomRowsAreNoRows) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  for (const char* text : {"full", "q8", "kivi4", "quest:budget=256"}) {
    const auto s = open_session(p.model, text, p.card, *p.pool);
    ASSERT_TRUE(s);
    ASSERT_DONE(s->fill_random(0, 1));
    EXPECT_EQ(s->tokens(), 0);
    const auto ids = random_ids(50, p.model->config().vocab, 28);
    ASSERT_DONE(s->prefill(ids));
  }
}

}  // namespace
}  // namespace longkv
