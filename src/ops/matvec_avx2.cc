#include "ops/matvec_x86.h"

namespace longkv {

MatvecRows matvec_rows_avx2(TensorType type) { return choose_matvec_rows(type); }

}  // namespace longkv
