// One thread that owns all slots: it reads prompts piece by piece between the decode steps of running answers.
//
// Delay of a running answer: between two of its tokens lie one decode step of all answering slots and other work of at
// most `prompt_share` steps (or one piece of it, where that takes longer: the smallest chunk of a prompt through one
// layer, a quarter of a megabyte of a slot that is copied, saved or checked).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/portions.h"
#include "engine/batch.h"
#include "engine/session.h"
#include "server/metrics.h"
#include "server/pace.h"
#include "server/request.h"
#include "server/slot.h"
#include "tokenizer/tokenizer.h"

namespace longkv::server {

struct SchedulerOptions {
  int slots = 1;
  size_t queue = 64;          // requests that may wait for a slot
  double prompt_share = 1.0;  // prompt work between two decode steps, in decode steps
  SessionOptions session;
  std::shared_ptr<PrefixCache> prefixes;  // null: slots alone remember
};

// What /slots shows.
struct SlotInfo {
  int id = 0;
  SlotState state = SlotState::kIdle;
  std::string recipe, request;
  int64_t context = 0;
  int64_t held = 0;  // tokens
  int64_t prompt_tokens = 0, prompt_done = 0, cached = 0;
  int64_t answered = 0, max_tokens = -1;
  int64_t kv_bytes = 0;
  double read_per_token = 0;  // K, V and summary bytes that decoding read for a token of this answer
  double captured_mass = -1;  // of its checked steps; -1: none
  SamplingParams sampling;
};

class Scheduler {
 public:
  // Errors: see Session::create.
  static Result<std::unique_ptr<Scheduler>> create(const std::shared_ptr<const LoadedModel>& model,
                                                   const Tokenizer& tokenizer, const SchedulerOptions& options,
                                                   ThreadPool& pool);
  ~Scheduler();

  // Events of the request come through the queue, the last one Finished or a Status. Null: too many requests wait.
  std::shared_ptr<EventQueue> submit(GenerateRequest request);
  // Runs `action` with a slot that serves nobody, and that serves nobody until it has ended. Beside other requests it
  // runs on a thread of its own and only now and then; it then gets a Pause to be called between its pieces, and may
  // not use the session's pool. Errors: kInvalidArgument (no such slot, or it is busy, which `busy` tells), kCancelled
  // (the server ends), those of `action`.
  using SlotAction = std::function<Status(Slot&, const Pause&)>;
  Status with_idle_slot(int slot, const SlotAction& action, bool* busy = nullptr);

  Counters counters() const;
  std::vector<SlotInfo> slots() const;
  const SchedulerOptions& options() const { return options_; }

 private:
  struct SlotWork {
    int slot = 0;
    const SlotAction* action = nullptr;
    Status result;
    bool begun = false, done = false, busy = false;
  };
  // Work beside everything else, with a slot that is left alone meanwhile.
  struct Aside {
    Slot* slot = nullptr;
    std::unique_ptr<Portions> run;
  };

  Scheduler(std::shared_ptr<const LoadedModel> model, const SchedulerOptions& options, ThreadPool& pool);
  void loop();
  bool busy(SlotState state) const;
  void write_prefix();
  void begin_storing();
  void end_storing();
  void begin_action();
  void end_action();
  void tell_done(SlotWork& item);
  bool go_on_aside();
  bool aside(const Slot* slot) const;
  void drop_gone();
  void assign();
  bool waits_for_copy(const Slot* slot) const;
  Slot* best_slot(const GenerateRequest& request);
  void read_prompts();
  Slot* next_prompt();
  bool late_turn();
  double other_work_seconds(bool answering) const;
  void answer();
  void abandon(Slot& slot, const Status& reason, bool broken = false);
  void count_end(const Slot& slot, const Job& job, const Status& status);
  static SlotInfo describe(const Slot& slot);
  void publish();

  SchedulerOptions options_;
  BatchDecoder batch_;
  std::vector<std::unique_ptr<Slot>> slots_;  // the thread's
  Pace pace_;
  bool read_some_ = false;  // prompts were read since the last step
  Clock::time_point told_;  // the last tokens were chosen
  uint64_t turn_ = 0;
  std::vector<Clock::time_point> last_token_;  // [slots]
  Clock::time_point published_;
  Counters now_;            // the thread's
  bool unwritten_ = false;  // the prefix cache may hold something that its folder does not
  // Slots whose prompts are to be copied into the prefix cache, in order. Until that is done nobody else looks into the
  // cache: no request begins, no prompt is read.
  std::deque<Slot*> to_store_;
  std::optional<Aside> storing_;  // the first of to_store_
  std::optional<Aside> action_;
  SlotWork* acting_ = nullptr;  // whose action it is
  bool act_next_ = true;        // of actions and prompts, which has the next turn

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> waiting_;
  std::deque<SlotWork*> works_;
  std::condition_variable work_done_;
  Counters counters_;
  std::vector<SlotInfo> infos_;
  int64_t refused_ = 0;
  int busy_ = 0;  // slots that serve a request
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace longkv::server
