// Filters on lists, dicts and other values with items.
#include <algorithm>
#include <optional>

#include "base/error.h"
#include "chat/jinja/filters.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

namespace {

using Items = std::vector<Value>;

// "a.b.0" as a chain of subscripts, as filters with an attribute use it.
class Getter {
 public:
  // Without an attribute every value is itself. A default stands in for undefined results.
  Getter(Interpreter& in, const Value* attribute, const Value* fallback) : in_(in) {
    if (fallback != nullptr) fallback_ = *fallback;
    if (attribute == nullptr || attribute->is(Kind::kNone)) return;
    if (!attribute->string()) {
      path_.push_back(*attribute);
      return;
    }
    const std::string_view text = attribute->str->text;
    for (size_t at = 0; at <= text.size();) {
      const size_t dot = std::min(text.find('.', at), text.size());
      const std::string_view part = text.substr(at, dot - at);
      const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
      path_.push_back(number && part.size() < 18 ? Value::of(int64_t(std::stoll(std::string(part))))
                                                 : Value::of(in.heap().part(attribute->str, at, dot)));
      at = dot + 1;
    }
  }

  Result<Value> operator()(Value v) const {
    for (const Value& key : path_) {
      LONGKV_ASSIGN(v, in_.item(v, key));
      if (v.undefined() && fallback_) return *fallback_;
    }
    return v;
  }

 private:
  Interpreter& in_;
  std::vector<Value> path_;
  std::optional<Value> fallback_;
};

// What is compared: the item or its attribute, in lower case unless the case counts.
Result<Items> keys_of(Interpreter& in, const Items& items, const Value* attribute, bool case_sensitive) {
  const Getter get(in, attribute, nullptr);
  Items keys;
  for (const Value& item : items) {
    LONGKV_ASSIGN(Value key, get(item));
    if (key.string() && !case_sensitive) key = Value::of(change_case(in.heap(), key.str, CaseChange::kLower));
    keys.push_back(key);
  }
  LONGKV_TRY(in.tick_items(4 * keys.size()));
  return keys;
}

// Indices of `keys` in order; stable.
Result<std::vector<size_t>> sorted(Interpreter& in, const Items& keys, bool reverse) {
  std::vector<size_t> by(keys.size());
  for (size_t i = 0; i < by.size(); ++i) by[i] = i;
  Status failed;
  std::stable_sort(by.begin(), by.end(), [&](size_t a, size_t b) {
    if (!failed.ok()) return false;
    Status s = in.tick();
    const Result<int> c = s.ok() ? (reverse ? order(keys[b], keys[a]) : order(keys[a], keys[b])) : Result<int>(s);
    if (!c.ok()) failed = c.status();
    return c.ok() && *c < 0;
  });
  LONGKV_TRY(failed);
  return by;
}

const Value* given(const Parameters& p, size_t i) { return p.has(i) ? &p[i] : nullptr; }

Result<Value> length_filter(Interpreter&, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("length", arguments, {}).status());
  LONGKV_ASSIGN(const int64_t n, length_of(input));
  return Value::of(n);
}

Result<Value> list_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("list", arguments, {}).status());
  LONGKV_ASSIGN(Items items, items_of(in.heap(), input));
  return in.list(std::move(items));
}

Result<Value> join_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("join", arguments, {"d", "attribute"}));
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  LONGKV_ASSIGN(const Str* between, in.text(p.has(0) ? p[0] : in.literal("")));
  const Getter get(in, given(p, 1), nullptr);
  TextBuilder out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.add(between);
    LONGKV_ASSIGN(const Value v, get(items[i]));
    const size_t before = out.size();
    LONGKV_TRY(append_text(out, v));
    LONGKV_TRY(in.tick_bytes(out.size() - before + between->text.size()));
  }
  return in.make(out);
}

Result<Value> first_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("first", arguments, {}).status());
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  return items.empty() ? in.heap().undefined("No first item, sequence was empty.") : items.front();
}

Result<Value> last_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("last", arguments, {}).status());
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  return items.empty() ? in.heap().undefined("No last item, sequence was empty.") : items.back();
}

Result<Value> reverse_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("reverse", arguments, {}).status());
  LONGKV_ASSIGN(Items items, items_of(in.heap(), input));
  std::reverse(items.begin(), items.end());
  if (!input.string()) return in.list(std::move(items), Kind::kGenerator);
  TextBuilder out;
  for (const Value& c : items) out.add(c.str);
  return in.make(out);
}

Result<Value> items_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("items", arguments, {}).status());
  if (input.undefined()) return in.list({}, Kind::kGenerator);
  if (!input.is(Kind::kDict)) return value_error("Can only get item pairs from a mapping.");
  Items pairs;
  for (const auto& [key, value] : input.dict->items) pairs.push_back(in.list({key, value}, Kind::kTuple));
  return in.list(std::move(pairs), Kind::kGenerator);
}

Result<Value> dictsort_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("dictsort", arguments, {"case_sensitive", "by", "reverse"}));
  LONGKV_ASSIGN(const Str* by, p.text(1, in.literal("key").str));
  if (by->text != "key" && by->text != "value") return value_error("You can only sort by either \"key\" or \"value\"");
  if (input.undefined()) return undefined_error(input);
  if (!input.is(Kind::kDict)) return value_error(fmt::format("dictsort takes a dict, not {}", type_name(input)));
  Items sort_by;
  for (const auto& [key, value] : input.dict->items) sort_by.push_back(by->text == "key" ? key : value);
  LONGKV_ASSIGN(const Items keys, keys_of(in, sort_by, nullptr, p.flag(0, false)));
  LONGKV_ASSIGN(const std::vector<size_t> in_order, sorted(in, keys, p.flag(2, false)));
  Items pairs;
  for (const size_t i : in_order) {
    const auto& [key, value] = input.dict->items[i];
    pairs.push_back(in.list({key, value}, Kind::kTuple));
  }
  return in.list(std::move(pairs));
}

Result<Value> sort_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("sort", arguments, {"reverse", "case_sensitive", "attribute"}));
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  // Several attributes, separated by commas, are compared one after the other.
  const Value whole = p.has(2) ? p[2] : Value::none();
  Items attributes = {whole};
  if (whole.string() && whole.str->text.find(',') != std::string_view::npos) {
    Arguments by;
    by.positional.push_back(in.literal(","));
    LONGKV_ASSIGN(const Value parts, split_text(in, whole.str, by, /*from_right=*/false));
    attributes = parts.list->items;
  }
  std::vector<Items> columns;
  for (const Value& attribute : attributes) {
    LONGKV_ASSIGN(Items column, keys_of(in, items, &attribute, p.flag(1, false)));
    columns.push_back(std::move(column));
  }
  Items keys = columns[0];
  for (size_t i = 0; columns.size() > 1 && i < keys.size(); ++i) {
    Items row;
    for (const Items& column : columns) row.push_back(column[i]);
    keys[i] = in.list(std::move(row));
  }
  LONGKV_ASSIGN(const std::vector<size_t> in_order, sorted(in, keys, p.flag(0, false)));
  Items out;
  for (const size_t i : in_order) out.push_back(items[i]);
  return in.list(std::move(out));
}

Result<Value> unique_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("unique", arguments, {"case_sensitive", "attribute"}));
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  LONGKV_ASSIGN(const Items keys, keys_of(in, items, given(p, 1), p.flag(0, false)));
  Dict* seen = in.heap().dict();
  Items out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!hashable(keys[i])) return value_error(fmt::format("unhashable type: '{}'", type_name(keys[i])));
    if (!keys[i].string()) LONGKV_TRY(in.tick_items(seen->items.size()));
    if (seen->find(keys[i]) != nullptr) continue;
    seen->set(keys[i], Value::none());
    out.push_back(items[i]);
  }
  return in.list(std::move(out), Kind::kGenerator);
}

template <bool want_max>
Result<Value> extreme_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("min or max", arguments, {"case_sensitive", "attribute"}));
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  if (items.empty()) return in.heap().undefined("No aggregated item, sequence was empty.");
  LONGKV_ASSIGN(const Items keys, keys_of(in, items, given(p, 1), p.flag(0, false)));
  size_t best = 0;
  for (size_t i = 1; i < keys.size(); ++i) {
    LONGKV_ASSIGN(const int c, order(keys[i], keys[best]));
    if (want_max ? c > 0 : c < 0) best = i;
  }
  return items[best];
}

Result<Value> sum_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("sum", arguments, {"attribute", "start"}));
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  const Getter get(in, given(p, 0), nullptr);
  Value total = p.has(1) ? p[1] : Value::of(int64_t{0});
  for (const Value& item : items) {
    LONGKV_ASSIGN(const Value v, get(item));
    const uint64_t before = in.heap().bytes();
    LONGKV_ASSIGN(total, arithmetic(in.heap(), NodeKind::kAdd, total, v));
    LONGKV_TRY(in.tick_bytes(in.heap().bytes() - before));
  }
  return total;
}

Arguments tail(const Arguments& arguments, size_t from) {
  Arguments rest;
  rest.positional.assign(arguments.positional.begin() + ptrdiff_t(std::min(from, arguments.positional.size())),
                         arguments.positional.end());
  rest.named = arguments.named;
  rest.names = arguments.names;
  return rest;
}

// map(attribute=..., default=...) or map("filter", arguments...).
Result<Value> map_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  if (!truthy(input)) return in.list({}, Kind::kGenerator);  // as Jinja does, even for none
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  Items out;
  if (arguments.positional.empty()) {
    LONGKV_ASSIGN(const Parameters p, Parameters::match("map", arguments, {"attribute", "default"}, 1));
    const Getter get(in, &p[0], given(p, 1));
    for (const Value& item : items) {
      LONGKV_ASSIGN(const Value v, get(item));
      out.push_back(v);
    }
  } else {
    LONGKV_ASSIGN(const Str* name, in.text(arguments.positional[0]));
    const Arguments rest = tail(arguments, 1);
    for (const Value& item : items) {
      LONGKV_ASSIGN(const Value v, in.filter(name->text, item, rest));
      out.push_back(v);
    }
  }
  LONGKV_TRY(in.tick_items(4 * out.size()));
  return in.list(std::move(out), Kind::kGenerator);
}

// select, reject, selectattr and rejectattr: items (or an attribute of theirs) that pass a test or are true.
template <bool wanted, bool by_attribute>
Result<Value> select_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  if (!truthy(input)) return in.list({}, Kind::kGenerator);  // even for none
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  const std::vector<Value>& given_values = arguments.positional;
  if (by_attribute && given_values.empty()) return value_error("Missing parameter for attribute name");
  const Getter get(in, by_attribute ? given_values.data() : nullptr, nullptr);
  const size_t test_at = by_attribute ? 1 : 0;
  const bool tested = given_values.size() > test_at;
  const Str* test = nullptr;
  if (tested) {
    LONGKV_ASSIGN(test, in.text(given_values[test_at]));
  }
  const Arguments rest = tail(arguments, test_at + 1);
  Items out;
  for (const Value& item : items) {
    LONGKV_ASSIGN(const Value v, get(item));
    bool holds = truthy(v);
    if (tested) {
      LONGKV_ASSIGN(holds, in.test(test->text, v, rest));
    }
    if (holds == wanted) out.push_back(item);
  }
  LONGKV_TRY(in.tick_items(4 * items.size()));
  return in.list(std::move(out), Kind::kGenerator);
}

Result<Value> batch_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("batch", arguments, {"linecount", "fill_with"}, 1));
  LONGKV_ASSIGN(const int64_t size, p.integer(0, 1));
  if (size < 1 || size > 100'000) return value_error("batch: the size must be between 1 and 100000");
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  Items out;
  for (size_t i = 0; i < items.size(); i += size_t(size)) {
    Items row(items.begin() + ptrdiff_t(i), items.begin() + ptrdiff_t(std::min(items.size(), i + size_t(size))));
    if (p.has(1) && !p[1].is(Kind::kNone)) row.resize(size_t(size), p[1]);
    out.push_back(in.list(std::move(row)));
  }
  return in.list(std::move(out), Kind::kGenerator);
}

Result<Value> slice_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("slice", arguments, {"slices", "fill_with"}, 1));
  LONGKV_ASSIGN(const int64_t slices, p.integer(0, 1));
  if (slices < 1 || slices > 100'000) return value_error("slice: the number must be between 1 and 100000");
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  const size_t each = items.size() / size_t(slices);
  const size_t longer = items.size() % size_t(slices);
  Items out;
  size_t at = 0;
  for (size_t i = 0; i < size_t(slices); ++i) {
    const size_t n = each + (i < longer ? 1 : 0);
    Items column(items.begin() + ptrdiff_t(at), items.begin() + ptrdiff_t(at + n));
    at += n;
    if (p.has(1) && !p[1].is(Kind::kNone) && i >= longer) column.push_back(p[1]);
    out.push_back(in.list(std::move(column)));
  }
  return in.list(std::move(out), Kind::kGenerator);
}

Result<Value> groupby_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p,
                Parameters::match("groupby", arguments, {"attribute", "default", "case_sensitive"}, 1));
  LONGKV_ASSIGN(const Items items, items_of(in.heap(), input));
  const Getter get(in, &p[0], given(p, 1));
  Items plain;
  for (const Value& item : items) {
    LONGKV_ASSIGN(const Value v, get(item));
    plain.push_back(v);
  }
  LONGKV_ASSIGN(const Items keys, keys_of(in, plain, nullptr, p.flag(2, false)));
  LONGKV_ASSIGN(const std::vector<size_t> in_order, sorted(in, keys, false));
  Items out;
  for (size_t i = 0; i < in_order.size();) {
    Items group;
    size_t j = i;
    for (; j < in_order.size(); ++j) {
      LONGKV_ASSIGN(const bool same, equal(keys[in_order[j]], keys[in_order[i]]));
      if (!same) break;
      group.push_back(items[in_order[j]]);
    }
    out.push_back(in.list({plain[in_order[i]], in.list(std::move(group))}, Kind::kTuple));
    i = j;
  }
  return in.list(std::move(out));
}

}  // namespace

std::span<const NamedFilter> sequence_filters() {
  static constexpr NamedFilter kFilters[] = {
      {"length", length_filter},
      {"count", length_filter},
      {"list", list_filter},
      {"join", join_filter},
      {"first", first_filter},
      {"last", last_filter},
      {"reverse", reverse_filter},
      {"items", items_filter},
      {"dictsort", dictsort_filter},
      {"sort", sort_filter},
      {"unique", unique_filter},
      {"min", extreme_filter<false>},
      {"max", extreme_filter<true>},
      {"sum", sum_filter},
      {"map", map_filter},
      {"select", select_filter<true, false>},
      {"reject", select_filter<false, false>},
      {"selectattr", select_filter<true, true>},
      {"rejectattr", select_filter<false, true>},
      {"batch", batch_filter},
      {"slice", slice_filter},
      {"groupby", groupby_filter},
  };
  return kFilters;
}

}  // namespace longkv::jinja
