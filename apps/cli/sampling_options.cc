#include "sampling_options.h"

#include <random>

#include "base/error.h"
#include "base/log.h"
#include "help.h"

namespace longkv::cli {

void add_sampling_options(CLI::App& command, SamplingOptions& o) {
  command.add_option("-s,--seed", o.seed, "Seed; -1 = random")->capture_default_str();
  command.add_option("--temp,--temperature", o.params.temperature, "Temperature; 0 and below = greedy")
      ->capture_default_str();
  command.add_option("--top-k", o.params.top_k, "Keep the k best; 0 = off")->capture_default_str();
  command.add_option("--top-p", o.params.top_p, "Keep the smallest set of this mass; 1 = off")->capture_default_str();
  command.add_option("--min-p", o.params.min_p, "Keep tokens this likely relative to the best; 0 = off")
      ->capture_default_str()
      ->group(kMore);
  command.add_option("--typical,--typical-p", o.params.typical, "Locally typical mass; 1 = off")
      ->capture_default_str()
      ->group(kMore);
  command.add_option("--repeat-penalty", o.params.repeat_penalty, "1 = off")->capture_default_str()->group(kMore);
  command.add_option("--repeat-last-n", o.params.repeat_last_n, "Tokens that penalties look back on; -1 = all")
      ->capture_default_str()
      ->group(kMore);
  command.add_option("--presence-penalty", o.params.presence_penalty, "0 = off")->capture_default_str()->group(kMore);
  command.add_option("--frequency-penalty", o.params.frequency_penalty, "0 = off")->capture_default_str()->group(kMore);
  command.add_option("--samplers", o.samplers, "Order, e.g. penalties;top_k;typ_p;top_p;min_p;temperature")
      ->group(kMore);
  command.add_option("-l,--logit-bias", o.logit_bias, "ID+BIAS or ID-BIAS; may be repeated")
      ->allow_extra_args(false)
      ->group(kMore);
  command.add_flag("--ignore-eos", o.ignore_eos, "Go on after the end of the answer");
}

Status check_biased_ids(const SamplingParams& params, int64_t vocab) {
  for (const auto& [id, bias] : params.logit_bias) {
    if (id < 0 || id >= vocab)
      return fail(Code::kInvalidArgument, "--logit-bias names token {}; the model has {} tokens", id, vocab);
  }
  return {};
}

Result<SamplingParams> resolve_sampling(const SamplingOptions& o) {
  SamplingParams p = o.params;
  if (!o.samplers.empty()) {
    LONGKV_ASSIGN(p.stages, parse_sampler_stages(o.samplers));
  }
  for (const std::string& text : o.logit_bias) {
    LONGKV_ASSIGN(const auto bias, parse_logit_bias(text));
    p.logit_bias.push_back(bias);
  }
  if (o.seed < -1) return fail(Code::kInvalidArgument, "--seed {} must be -1 or more", o.seed);
  p.seed = uint64_t(o.seed);
  if (o.seed == -1) {
    p.seed = std::random_device{}();
    if (p.temperature > 0.0f) log_info("seed: {}", p.seed);
  }
  LONGKV_TRY(validate(p));
  return p;
}

}  // namespace longkv::cli
