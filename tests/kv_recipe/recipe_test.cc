#include "kv/recipe.h"

#include <gtest/gtest.h>

#include <random>

#include "kv/recipe/parts.h"
#include "kv/recipe/stage.h"
#include "kv/recipe/words.h"

namespace longkv {
namespace {

Recipe parsed(const std::string& text) {
  Result<Recipe> r = parse_recipe(text);
  EXPECT_TRUE(r.ok()) << text << ": " << r.status().message();
  return r.ok() ? *r : Recipe{};
}

// The message of the refusal, which must contain every part.
void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
  Result<Recipe> r = parse_recipe(text);
  ASSERT_FALSE(r.ok()) << text << " gave " << r->canonical();
  EXPECT_EQ(r.status().code(), Code::kInvalidArgument);
  for (const std::string& part : parts) {
    EXPECT_NE(r.status().message().find(part), std::string::npos)
        << text << "\n  message: " << r.status().message() << "\n  lacks: " << part;
  }
}

TEST(Recipe, PresetsHaveThePublishedValues) {
  EXPECT_EQ(parsed("full").canonical(), "store=f16 + select=all");
  EXPECT_EQ(parsed("streaming").canonical(), "keep=streaming(sink=4,window=2044) + store=f16 + select=all");
  EXPECT_EQ(parsed("quest").canonical(),
            "store=f16 + index=minmax(block=16,summary=q8) + select=topk(budget=1024,sink=0,local=0,dense_layers=2)");
  EXPECT_EQ(parsed("infllm").canonical(),
            "store=f16 + index=repr(block=128,reps=4) + select=topk(budget=6272,sink=128,local=4096,heads=shared)");
  EXPECT_EQ(parsed("ktransformers").canonical(),
            "store=f16 + index=dynamic(block=128,reps=1) + select=topk(budget=16512,sink=128,local=4096,heads=shared)");
  EXPECT_EQ(parsed("ktransformers-preselect").canonical(),
            "store=f16 + index=dynamic(block=128,reps=1) + select=topk(budget=8320,sink=128,local=4096,heads=shared,"
            "dense_layers=2,preselect=32)");
  EXPECT_EQ(parsed("onebit").canonical(),
            "store=f16 + index=bits(block=16,coarse=1) + select=topk(budget=1024,sink=16,local=64,aggregate=softmax)");
  EXPECT_EQ(parsed("sparq").canonical(),
            "store=f16 + index=channels(channels=32,coarse=1) + select=topk(budget=1024,sink=0,local=256) + tail=mean");
  EXPECT_EQ(parsed("double_sparsity").canonical(),
            "store=f16 + index=labels(channels=16,coarse=1) + select=topk(budget=1024,sink=0,local=64)");
  EXPECT_EQ(parsed("twilight").canonical(),
            "store=f16 + index=minmax(block=16) + select=topp(budget=8192,sink=0,local=16,p=0.85,candidates=8192,"
            "dense_layers=2)");
  EXPECT_EQ(parsed("magicpig").canonical(),
            "store=f16 + index=lsh(hash_bits=10,tables=150) + select=sampled(sink=4,local=64,dense=\"0,16,32,48,64\")");
  EXPECT_EQ(parsed("retroinfer").canonical(),
            "store=f16 + index=clusters(cluster=16,segment=8192) + select=topk(budget=1024,share=0.018,sink=4,local=64,"
            "aggregate=softmax) + tail=clusters(share=0.232)");
  EXPECT_EQ(
      parsed("vattention").canonical(),
      "store=f16 + index=bits(block=1,coarse=1) + select=topk(budget=1024,sink=128,local=128,aggregate=softmax) + "
      "tail=sample(rate=0.025,epsilon=0.05,delta=0.05)");
  EXPECT_EQ(parsed("q8").canonical(), "store=q8_0 + select=all");
  EXPECT_EQ(parsed("snapkv").canonical(), "keep=snapkv(budget=2048) + store=f16 + select=all");
  EXPECT_EQ(parsed("h2o").keep.keep_ratio, 0.2);
  EXPECT_EQ(parsed("h2o:budget=512").keep.keep_ratio, 0);
  EXPECT_EQ(parsed("duo:gates=x.tsv").canonical(),
            "keep=duo(sink=64,window=256,gates=x.tsv,ratio=0.5) + store=f16 + select=all");
  for (const std::string& name : recipe_presets()) {
    if (name == "duo") continue;  // needs a file
    EXPECT_EQ(parsed(name).name, name);
    EXPECT_TRUE(parsed(name).notes.empty()) << name;
  }
}

TEST(Recipe, OverridesStagesAndBlanks) {
  const Recipe quest = parsed("quest:block=32,budget=2K,store=q8_0");
  EXPECT_EQ(quest.index.block, 32);
  EXPECT_EQ(quest.select.budget, 2048);
  EXPECT_EQ(quest.select.dense_layers, 2);
  EXPECT_EQ(quest.store.k, KvType::kQ8_0);
  EXPECT_EQ(quest.name, "quest:block=32,budget=2K,store=q8_0");

  const Recipe joined = parsed("  quest\t+store ( k = q8_0 , v = f16 )");
  EXPECT_EQ(joined.store.k, KvType::kQ8_0);
  EXPECT_EQ(joined.store.v, KvType::kF16);
  EXPECT_EQ(joined.index.kind, IndexKind::kMinMax);

  const Recipe custom =
      parsed("index=bits(block=16,rotate=false) + select=topk(budget=1M,heads=query,aggregate=softmax)");
  EXPECT_EQ(custom.name, "custom");
  EXPECT_FALSE(custom.index.rotate);
  EXPECT_EQ(custom.select.budget, 1 << 20);
  EXPECT_EQ(custom.select.heads, SelectHeads::kPerQueryHead);
  EXPECT_EQ(custom.select.aggregate, Aggregate::kSoftmaxSum);
  EXPECT_EQ(custom.store.k, KvType::kF16);

  EXPECT_EQ(parsed("streaming:budget=4K").keep.window, 4096 - 4);
  EXPECT_EQ(parsed("prefill=dense+keep=all+tail=none+place=cpu"), parsed("full"));
  EXPECT_FALSE(parsed("full") == parsed("full:store=q4_0"));
}

TEST(Recipe, PresetsJoinWhereTheySetDifferentStages) {
  const Recipe r = parsed("quest:budget=2K+q8");
  EXPECT_EQ(r.store.k, KvType::kQ8_0);
  EXPECT_EQ(r.select.budget, 2048);
  EXPECT_EQ(r.name, "quest:budget=2K+q8");
  EXPECT_EQ(parsed("q4+quest"), parsed("quest:store=q4_0"));
  EXPECT_EQ(parsed("quest:k=q8_0").canonical(), parsed("quest+store(k=q8_0)").canonical());
  expect_refused("q8+q4", {"'q4' sets the stage 'store', which 'q8'"});
  expect_refused("quest:store=q8_0+q4", {"sets the stage 'store'"});
}

TEST(Recipe, ASmallBudgetScalesThePublishedWindow) {
  const Recipe r = parsed("ktransformers:budget=2048");
  EXPECT_EQ(r.select.budget, 2048);
  EXPECT_EQ(r.select.sink, 128);
  EXPECT_EQ(r.select.local, 512);  // 2048 * 4096 / 16512 = 508, in blocks of 128
  ASSERT_EQ(r.notes.size(), 1u);
  EXPECT_NE(r.notes[0].find("local=512"), std::string::npos);
  // A window that fits is left alone, and one that the user gave is never changed.
  EXPECT_EQ(parsed("ktransformers:budget=8K").select.local, 4096);
  EXPECT_TRUE(parsed("ktransformers:budget=8K").notes.empty());
  EXPECT_EQ(parsed("ktransformers:budget=2K,local=1K").select.local, 1024);
  expect_refused("ktransformers:budget=2K,local=4K",
                 {"budget=2048 holds no block of 128", "nearest legal: budget=4479"});
  // The initial tokens follow the block.
  const Recipe bits = parsed("ktransformers:index=bits,block=16,budget=2K");
  EXPECT_EQ(bits.select.sink, 64);
  EXPECT_EQ(bits.select.local, 512);
  EXPECT_EQ(bits.index.kind, IndexKind::kBits);
  const Recipe pre = parsed("ktransformers-preselect:block=16,budget=2K");
  EXPECT_EQ(pre.select.preselect, 256);
  // The order of overrides does not matter.
  EXPECT_EQ(parsed("ktransformers:block=16,budget=2K,reps=3,index=fixed"),
            parsed("ktransformers:index=fixed,reps=3,budget=2K,block=16"));
}

TEST(Recipe, SmallestLegalBudgetIsLegal) {
  for (const char* name : {"quest", "infllm", "ktransformers", "ktransformers-preselect"}) {
    const Result<Recipe> refused = parse_recipe(std::string(name) + ":sink=100,local=1000,token_step=5,budget=1");
    ASSERT_FALSE(refused.ok());
    const std::string message = refused.status().message();
    const size_t at = message.find("nearest legal: budget=");
    ASSERT_NE(at, std::string::npos) << message;
    const int64_t budget = std::stoll(message.substr(at + 22));
    const std::string head = std::string(name) + ":sink=100,local=1000,token_step=5,budget=";
    EXPECT_TRUE(parse_recipe(head + std::to_string(budget)).ok());
    EXPECT_FALSE(parse_recipe(head + std::to_string(budget - 1)).ok());
  }
}

TEST(Recipe, MistakesAreNamedWithPositionAndHelp) {
  expect_refused("", {"position 1", "a preset or a stage"});
  expect_refused("quset", {"position 1", "unknown preset 'quset'", "ktransformers-preselect", "did you mean 'quest'?"});
  expect_refused("snapkv:budget=512,keep_ratio=0.1", {"budget and keep_ratio", "give one"});
  // Nothing kept is no request for the default.
  for (const char* name : {"snapkv", "normmass", "keydiff", "asymkv", "h2o", "kvzip", "adakv", "tova"}) {
    for (const char* nothing : {"keep_ratio=0", "keep_ratio=0.0", "keep_ratio=0%", "budget=0,keep_ratio=0"}) {
      if (std::string(name) == "kvzip" && nothing[0] == 'b') continue;
      expect_refused(std::string(name) + ":" + nothing, {"keep_ratio=0"});
      expect_refused(std::string("keep=") + name + "(" + nothing + ")", {"keep_ratio=0"});
    }
  }
  expect_refused("snapkv:keep_ratio=0", {"position 19", "keeps nothing", "above 0, to 1", "a budget of rows"});
  EXPECT_TRUE(parse_recipe("keep=h2o(budget=500,keep_ratio=0)").ok());
  expect_refused("quest:bugdet=3", {"position 7", "bugdet", "did you mean 'budget'?", "dense_layers"});
  expect_refused("quest:budget=lots", {"position 14", "budget='lots'", "whole number"});
  expect_refused("quest:budget=99999999999999999999G", {"out of range"});
  expect_refused("quest:budget=9999999999G", {"out of range"});
  EXPECT_TRUE(parse_recipe("quest:budget=1099511627776").ok()) << "the largest that the message allows";
  expect_refused("quest:budget=1099511627777", {"out of range"});
  expect_refused("quest:budget=-5", {"is no number"});
  expect_refused("quest:budget=0", {"out of range"});
  expect_refused("quest:budget", {"position 13", "'='"});
  expect_refused("quest:", {"position 7", "a parameter"});
  expect_refused("quest:budget=1K,budget=2K", {"'budget' is given twice"});
  expect_refused("quest=16", {"is a preset", "colon"});
  expect_refused("index:block=3", {"is a stage, not a preset"});
  expect_refused("index", {"is a stage, not a preset"});
  expect_refused("index=minmx", {"position 7", "did you mean 'minmax'?"});
  expect_refused("indx=minmax", {"unknown stage 'indx'", "did you mean 'index'?"});
  expect_refused("index(block=16)", {"needs a choice"});
  expect_refused("index=minmax(reps=2)+select=topk",
                 {"unknown parameter of index=minmax 'reps'", "block, summary, coarse"});
  expect_refused("select=all(budget=3)", {"select=all takes no parameters"});
  expect_refused("index=minmax(block=16", {"ends where ',' or ')' is expected"});
  expect_refused("quest + ", {"ends where a preset or a stage is expected"});
  expect_refused("quest ? full", {"position 7", "found '?'"});
  expect_refused("quest\x01", {"byte 0x01"});
  expect_refused("store=f8", {"unknown choice of store"});
  expect_refused("quest:heads=all", {"value of heads", "kv, shared, query"});
  expect_refused("full:budget=2K", {"unknown parameter of full 'budget'", "store"});
  expect_refused(std::string(5000, 'a'), {"too long"});
  std::string many = "quest";
  for (int i = 0; i < 20; ++i) many += "+quest";
  expect_refused(many, {"at most 16 parts"});
}

TEST(Recipe, StoreAndMaskJoin) {
  const auto kivi = parse_recipe("kivi2");
  ASSERT_TRUE(kivi.ok());
  EXPECT_EQ(kivi->store.k, KvType::kKivi2);
  EXPECT_EQ(kivi->store.window, 128);
  EXPECT_EQ(kivi->store.sink, 0);
  const auto both = parse_recipe("leank:mask=\"a mask.gguf\",window=1K+kivi2:sink=4+quest:budget=2K");
  ASSERT_TRUE(both.ok()) << both.status().message();
  EXPECT_EQ(both->mask.mask, "a mask.gguf");
  EXPECT_EQ(both->select.budget, 2048);
  const StoreRegions regions = store_regions(both->store, both->mask);
  EXPECT_TRUE(regions.on);
  EXPECT_EQ(regions.window, 1024);  // the larger of both
  EXPECT_EQ(regions.sink, 128);
  EXPECT_EQ(regions.old.v, KvType::kKivi2);
  EXPECT_EQ(regions.raw.k, KvType::kF16);
  for (const char* text : {"q8", "q4:rotate=true", "fp8:window=64", "kivi4:sink=4,window=256", "think:ratio=0.5+q8",
                           "leank:mask=m,removed=drop+fp8", "store(k=q8_0,v=q4_0,rotate=k,window=32)", "quest+q8"}) {
    const auto recipe = parse_recipe(text);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    const auto again = parse_recipe(recipe->canonical());
    ASSERT_TRUE(again.ok()) << recipe->canonical();
    EXPECT_EQ(*again, *recipe) << recipe->canonical();
    EXPECT_TRUE(again->store == recipe->store && again->mask == recipe->mask) << recipe->canonical();
  }
  EXPECT_FALSE(store_regions(parse_recipe("q8:rotate=true")->store, MaskSpec{}).on);
  expect_refused("store(k=kivi2,v=q8_0)", {"go together", "kivi2"});
  expect_refused("kivi2:rotate=true", {"scale per channel", "rotate=v"});
  expect_refused("think+q4:rotate=true", {"mask chooses between", "rotate=v"});
  expect_refused("store=f16(rotate=true)", {"only encoded types", "rotate=false"});
  expect_refused("think:ratio=1", {"0.95"});
}

TEST(Recipe, WordsOfLaterVersionsAreKnown) {
  expect_refused("place=hybrid", {"known but not in this version", "place=cpu"});
}

TEST(Recipe, PrefillStage) {
  EXPECT_EQ(parsed("xattention").canonical(),
            "prefill=xattention(sink=128,tau=0.9,stride=16,min_blocks=16) + store=f16 + select=all");
  EXPECT_EQ(parsed("flex").canonical(), "prefill=flex(gamma=0.9,tau=0.1,min_budget=1024) + store=f16 + select=all");
  EXPECT_EQ(parsed("a_shape:last=100+q8"), parsed("prefill=a_shape(sink=128,window=3968,last=100) + store=q8_0"));
  EXPECT_EQ(parsed("quest+minference").prefill.diagonals, 6096);
  for (const char* text : {"minference:file=\"a b.json\",missing=vertical_slash,dense_layers=0,threshold=64K,chunk=8K",
                           "prefill=block_sparse(blocks=7,last=0)", "prefill=xattention(tau=50%,heads=kv,stride=8)"}) {
    const Recipe recipe = parsed(text);
    EXPECT_EQ(parsed(recipe.canonical()), recipe) << recipe.canonical();
    EXPECT_FALSE(recipe == parsed("full")) << text;
  }
  EXPECT_EQ(parsed("minference:file=\"a b.json\"").prefill.file, "a b.json");
  expect_refused("flex:stride=8", {"unknown parameter", "gamma"});
  expect_refused("xattention:chunk=1000", {"nearest legal: chunk=1024"});
  expect_refused("prefill=xatention", {"did you mean 'xattention'"});
}

TEST(Recipe, IllegalCombinationsNameTheNearestLegalOne) {
  expect_refused("select=topk(budget=1K)", {"needs an index", "index=minmax(block=16)"});
  expect_refused("index=minmax", {"never read", "select=topk"});
  expect_refused("keep=streaming + index=minmax + select=topk", {"nothing to choose", "keep=streaming(sink=4"});
  expect_refused("quest+infllm", {"'infllm' sets the stage 'index', which 'quest' (position 1) has set"});
  expect_refused("quest+select=topk(budget=2K)", {"sets the stage 'select'", "quest:budget=2K"});
  expect_refused("store=f16+store=q8_0", {"sets the stage 'store'"});
  expect_refused("index=fixed(block=4,reps=8)+select=topk", {"reps=8 exceeds block=4", "nearest legal: reps=4"});
  expect_refused("quest:preselect=9,preselect_kernel=8", {"no middle", "9"});
}

// A random value inside the field's range.
template <class Below>
RecipeValue any_value(const RecipeField& f, const Below& below) {
  switch (f.kind) {
    case RecipeField::Kind::kText: return std::string(below(2) == 0 ? "a/b.gguf" : "a name with, blanks");
    case RecipeField::Kind::kReal: return f.min + (f.max - f.min) * double(below(1001)) / 1000;
    case RecipeField::Kind::kWord: {
      const std::string words = f.words;
      return below(1 + std::count(words.begin(), words.end(), ' '));
    }
    case RecipeField::Kind::kCount: break;
  }
  const int64_t min = int64_t(f.min), span = int64_t(f.max) - min + 1;
  return min + (below(2) == 0 ? below(std::min<int64_t>(span, 200)) : below(span));
}

// Random legal and illegal recipes built from the table of fields.
TEST(Recipe, CanonicalStringsParseBackEqual) {
  std::mt19937 random(11);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  int legal = 0;
  for (int i = 0; i < 50000; ++i) {  // most break a rule
    Recipe r;
    for (const RecipeStageInfo& stage : recipe_stages()) {
      const std::string choice = stage.choices[size_t(below(int64_t(stage.choices.size())))];
      stage.set(r, choice);
      for (const RecipeField& f : stage.fields) {
        if (find_field(stage, choice, f.key) == &f && below(2) == 0) f.set(r, any_value(f, below));
      }
    }
    // Rules that hardly any random number meets.
    r.prefill.chunk = std::max<int64_t>(128, r.prefill.chunk / 128 * 128);
    r.prefill.stride = r.prefill.stride % 2 == 0 ? 8 : 16;
    if (!validate_recipe(r).ok()) continue;
    ++legal;
    const std::string text = r.canonical();
    const Result<Recipe> back = parse_recipe(text);
    ASSERT_TRUE(back.ok()) << text << ": " << back.status().message();
    EXPECT_TRUE(*back == r) << text << "\n" << back->canonical();
    for (const RecipeStageInfo& stage : recipe_stages()) {
      for (const RecipeField& f : stage.fields) {
        if (find_field(stage, stage.get(r), f.key) == &f) {
          ASSERT_EQ(f.get(*back), f.get(r)) << f.key << " of " << text;
        }
      }
    }
  }
  EXPECT_GT(legal, 300);
}

TEST(RecipeWords, NearestWord) {
  const std::vector<std::string> words{"budget", "block", "local"};
  EXPECT_EQ(nearest_word("bugdet", words), "budget");
  EXPECT_EQ(nearest_word("BLOCK", words), "block");
  EXPECT_EQ(nearest_word("lcal", words), "local");
  EXPECT_EQ(nearest_word("zebra", words), "");
  EXPECT_EQ(nearest_word(std::string(10000, 'x'), words), "");
}

}  // namespace
}  // namespace longkv
