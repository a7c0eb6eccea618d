// What a model, a recipe and a context cost on this machine, before anything is allocated: bytes held, bytes read by
// one decoded token, time. What does not fit is refused with the amount that is missing and with what would fit.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "kv/recipe.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

class Keeper;

struct PlanModel {
  KvShape shape;
  int64_t trained_context = 0;         // tokens; 0 = unknown
  int64_t weight_bytes = 0;            // mapped from the file
  int64_t weight_bytes_per_token = 0;  // read by one decode step
  int64_t hidden_bytes_per_token = 0;  // hidden state that a prompt token holds while a prompt is read
  int64_t hidden_bytes_limit = 0;      // ... at most so much; 0 = no limit
  int64_t tape_bytes_per_token = 0;    // of a chunk whose pass through the model is recorded (KeepNeeds::scoring)
  int64_t scratch_bytes = 0;           // buffers that do not depend on the context
};

struct PlanMachine {
  int64_t ram_bytes = 0;  // available to this process
  int64_t bandwidth = 0;  // bytes per second that all threads together read from memory; 0 = unknown
  int threads = 0;        // for the text only
  // Above 0: K and V lie on a disk with so much room, and memory is only their cache.
  int64_t disk_bytes = 0;
};

struct KvPlan {
  Recipe recipe;
  PlanModel model;
  PlanMachine machine;
  std::vector<int> kept_channels;  // of K in old rows, [layers][kv_heads]; empty: all
  int64_t context = 0;
  int64_t largest_context = 0;  // that fits, at most trained_context where it is known; 0: not even one token

  std::shared_ptr<const Keeper> keeper;  // of the recipe's keep stage; null: every row stays

  // Bytes held at the end of a prompt of `context` tokens.
  int64_t k_bytes = 0;
  int64_t v_bytes = 0;
  int64_t field_bytes = 0;  // positions, biases and counts of rows, where the recipe evicts or merges
  int64_t index_bytes = 0;
  // Held only while the prompt is read: hidden states, attention mass, rows of one layer that do not stay.
  int64_t prompt_bytes = 0;
  int64_t peak_bytes = 0;  // of memory, weights and scratch included

  // Bytes read by one decoded token at that depth, and how many layers read how.
  int64_t read_rows_bytes = 0;
  int64_t read_index_bytes = 0;
  int64_t read_bytes = 0;  // weights included
  int dense_layers = 0;
  int choosing_layers = 0;
  int reusing_layers = 0;
  int evicting_layers = 0;
  double token_seconds = 0;  // read_bytes over bandwidth; 0 = unknown

  bool on_disk() const { return machine.disk_bytes > 0; }
  int64_t disk_needed() const { return on_disk() ? k_bytes + v_bytes : 0; }
  bool fits() const { return peak_bytes <= machine.ram_bytes && disk_needed() <= machine.disk_bytes; }
};

// context 0: the largest that fits, at most the trained one. Errors: kInvalidArgument (shape, context, a store type
// that the channels do not allow). A plan that does not fit is returned all the same; see check_plan.
Result<KvPlan> make_plan(const PlanModel& model, const Recipe& recipe, const PlanMachine& machine, int64_t context);

// kOutOfMemory unless the plan fits; the message has the missing amount, the largest context that fits and the K and V
// type with which the wanted context fits.
Status check_plan(const KvPlan& plan);

// Several lines for people; the same for programs.
std::string plan_text(const KvPlan& plan);
nlohmann::json plan_json(const KvPlan& plan);

// "1.50 GiB"
std::string format_bytes(int64_t bytes);

// Memory that this process can still take: the system's estimate, or the control group's limit if that is smaller.
int64_t available_ram_bytes();

}  // namespace longkv
