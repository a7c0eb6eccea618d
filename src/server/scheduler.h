// One thread that owns all slots: it reads prompts piece by piece between the decode steps of running answers.
//
// Delay of a running answer: between two of its tokens lie one decode step of all answering slots and prompt work of at
// most `prompt_share` steps (or one piece of prompt: the smallest chunk through one layer, where that takes longer).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/batch.h"
#include "engine/session.h"
#include "server/metrics.h"
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
  // Runs `work` on the scheduler's thread with a slot that serves nobody. Errors: kInvalidArgument (no such slot, or it
  // is busy, which `busy` tells), kCancelled (the server ends), those of `work`.
  Status with_idle_slot(int slot, const std::function<Status(Slot&)>& work, bool* busy = nullptr);

  Counters counters() const;
  std::vector<SlotInfo> slots() const;
  const SchedulerOptions& options() const { return options_; }

 private:
  Scheduler(std::shared_ptr<const LoadedModel> model, const SchedulerOptions& options, ThreadPool& pool);
  void loop();
  bool busy(SlotState state) const;
  void write_prefix();
  void do_works();
  void drop_gone();
  void assign();
  Slot* best_slot(const GenerateRequest& request);
  double ordinary_step() const;
  void read_prompts();
  Slot* next_prompt();
  void answer();
  void abandon(Slot& slot, const Status& reason, bool broken = false);
  void count_end(const Slot& slot, const Job& job, const Status& status);
  void publish();

  SchedulerOptions options_;
  BatchDecoder batch_;
  std::vector<std::unique_ptr<Slot>> slots_;  // the thread's
  // Seconds of decode steps, in turns without and with prompt work.
  struct StepSeconds {
    double alone = 0, beside = 0;
  };
  std::vector<StepSeconds> step_seconds_;  // by the number of slots in a step, from 1
  size_t last_batch_ = 0;
  bool read_some_ = false;    // prompts were read since the last step
  double token_seconds_ = 0;  // of a prompt token in one layer
  uint64_t turn_ = 0;
  std::vector<Clock::time_point> last_token_;  // [slots]
  Clock::time_point published_;
  Counters now_;            // the thread's
  bool unwritten_ = false;  // the prefix cache may hold something that its folder does not

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> waiting_;
  struct SlotWork {
    int slot = 0;
    const std::function<Status(Slot&)>* work = nullptr;
    Status result;
    bool begun = false, done = false, busy = false;
  };
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
