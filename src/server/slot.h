// One place for a sequence: a session, what it holds, and the request that it serves. Used by the scheduler's thread.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/portions.h"
#include "engine/kv_file.h"
#include "engine/prefix_cache.h"
#include "engine/session.h"
#include "sample/sampler.h"
#include "server/answer_text.h"
#include "server/choose_token.h"
#include "server/events.h"
#include "server/request.h"
#include "tokenizer/tokenizer.h"

namespace longkv::server {

using Clock = std::chrono::steady_clock;

inline double ms_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::milli>(b - a).count();
}

// Mean over layers and checked steps; -1 where none was checked.
double captured_mass(const KvStats& stats);

// A request on its way through the scheduler.
struct Job {
  GenerateRequest request;
  std::shared_ptr<EventQueue> events = std::make_shared<EventQueue>();
  Clock::time_point arrived = Clock::now();
};

enum class SlotState { kIdle, kReading, kAnswering };

class Slot {
 public:
  // `prefixes` may be null: then only what the slot itself holds is reused.
  Slot(int id, std::unique_ptr<Session> session, const Tokenizer& tokenizer, PrefixCache* prefixes);

  int id() const { return id_; }
  SlotState state() const { return state_; }
  const Job& job() const { return *job_; }
  std::shared_ptr<const Job> shared_job() const { return job_; }
  Session& session() { return *session_; }
  const Session& session() const { return *session_; }
  const std::vector<int32_t>& held() const { return session_->ids(); }
  Clock::time_point last_used() const { return last_used_; }
  const Timings& timings() const { return timings_; }
  Finish last_finish() const { return last_finish_; }
  const std::string& recipe() const { return recipe_; }  // canonical
  // Tokens of the request that this slot need not read again.
  //
  // Exact reuse gives the bits of an answer without it: rows that prompts read (Session::origin()), never rows of
  // decoded tokens, whose products add in another order, and only where the recipe keeps beginnings.
  int64_t reusable(const GenerateRequest& request) const;

  // Takes a job while idle. Errors end the job, not the slot.
  Status begin(std::shared_ptr<Job> job);
  // One piece of the prompt; when it was the last, the slot answers.
  Status read(int64_t at_most);
  // Tokens of the prompt that are held or read, and those that are not.
  int64_t prompt_done() const {
    return state_ == SlotState::kReading ? timings_.cached_tokens + session_->prompt_progress()
                                         : timings_.prompt_tokens;
  }
  int64_t prompt_left() const { return timings_.prompt_tokens - prompt_done(); }
  // Chooses the next token and tells the client. The token must be fed before the next call; nullopt: the answer ended.
  Result<std::optional<int32_t>> choose();
  // Whether a prompt that was just read is worth a place in the prefix cache; asked once. store_prefix() puts it there
  // after the first token was chosen, so that its client does not wait, and before it is fed: hold() keeps it, and
  // choose() gives it back.
  bool take_worth_storing() { return std::exchange(worth_storing_, false); }
  void hold(int32_t id) { held_token_ = id; }
  void store_prefix(const Pause& pause);
  // Ends the job early and keeps what can be used again; nothing of a session that failed in the middle of a token.
  void abandon(const Status& reason, bool broken = false);
  // While idle: forgets everything held, and puts another recipe in place, which forgets too unless it is the same.
  void erase();
  Status use_recipe(const Recipe& recipe);
  // While idle: puts what a KV file holds in place, under the recipe that it was saved with. After an error the slot
  // holds what it held. Errors: see restore_session().
  Result<KvRestored> restore(const Recipe& recipe, const std::string& path, const std::string& salt,
                             const Pause& pause = {});
  // Who may share what is held now.
  const std::string& salt() const { return salt_; }

 private:
  void take_prefix(int64_t& keep);
  void begin_answer();
  void finish(Finish finish);
  void rest();
  void send(TextPiece piece);
  void report_progress(bool force);
  void take_stats();

  int id_;
  std::unique_ptr<Session> session_;
  const Tokenizer& tokenizer_;
  PrefixCache* prefixes_;
  SlotState state_ = SlotState::kIdle;
  std::string recipe_;
  std::string salt_;
  bool worth_storing_ = false;  // the session holds a prompt just read that the prefix cache does not know
  std::optional<int32_t> held_token_;
  bool from_cache_ = false;  // what is held of the prompt came from the prefix cache
  Clock::time_point last_used_ = Clock::now();

  std::shared_ptr<Job> job_;
  std::optional<Sampler> sampler_;
  std::optional<AnswerText> text_;
  std::optional<JsonAcceptor> grammar_;
  PromptReports prompt_reports_;
  Timings timings_;
  Finish last_finish_ = Finish::kStop;
  Clock::time_point began_, answering_since_, progress_sent_;
};

}  // namespace longkv::server
