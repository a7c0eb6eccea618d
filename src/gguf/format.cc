#include "gguf/format.h"

namespace longkv {

const char* gguf_type_name(uint32_t type) {
  constexpr const char* kNames[kGgufTypeCount] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                  "bool", "string", "array", "u64", "i64", "f64"};
  return type < kGgufTypeCount ? kNames[type] : "unknown";
}

const char* gguf_foreign_tensor_type(uint32_t id) {
  switch (id) {
    case 4: return "q4_2";
    case 5: return "q4_3";
    case 9: return "q8_1";
    case 15: return "q8_K";
    case 16: return "iq2_xxs";
    case 17: return "iq2_xs";
    case 18: return "iq3_xxs";
    case 19: return "iq1_s";
    case 21: return "iq3_s";
    case 22: return "iq2_s";
    case 24: return "i8";
    case 25: return "i16";
    case 26: return "i32";
    case 27: return "i64";
    case 28: return "f64";
    case 29: return "iq1_m";
    case 31: return "q4_0_4_4";
    case 32: return "q4_0_4_8";
    case 33: return "q4_0_8_8";
    case 34: return "tq1_0";
    case 35: return "tq2_0";
    case 36: return "iq4_nl_4_4";
    case 37: return "iq4_nl_4_8";
    case 38: return "iq4_nl_8_8";
    case 39: return "mxfp4";
    case 40: return "nvfp4";
    default: return nullptr;
  }
}

bool gguf_retired_tensor_type(uint32_t id) {
  return id == 4 || id == 5 || (id >= 31 && id <= 33) || (id >= 36 && id <= 38);
}

}  // namespace longkv
