#ifdef LONGKV_WITH_CUDA

#include "cuda/gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include "base/error.h"

namespace longkv {

namespace {
constexpr const char* kNames[] = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};
constexpr int64_t kBufferAlignment = 256;
constexpr size_t kMostPlans = 4096;  // shapes of learning follow the lengths of documents
}  // namespace

// The functions of the library that are used.
#define LONGKV_CUBLAS_FUNCTIONS(use)                                                                           \
  use(cublasLtCreate) use(cublasLtDestroy) use(cublasLtGetStatusName) use(cublasLtMatmul)                      \
      use(cublasLtMatmulAlgoGetHeuristic) use(cublasLtMatmulDescCreate) use(cublasLtMatmulDescDestroy)         \
          use(cublasLtMatmulDescSetAttribute) use(cublasLtMatrixLayoutCreate) use(cublasLtMatrixLayoutDestroy) \
              use(cublasLtMatrixLayoutSetAttribute) use(cublasLtMatmulPreferenceCreate)                        \
                  use(cublasLtMatmulPreferenceDestroy) use(cublasLtMatmulPreferenceSetAttribute)

// They are found by name when the first session on a card asks for them.
struct CardGemm::Library {
  void* file = nullptr;
#define LONGKV_CUBLAS(name) decltype(&::name) name = nullptr;
  LONGKV_CUBLAS_FUNCTIONS(LONGKV_CUBLAS)
#undef LONGKV_CUBLAS

  ~Library() {
    if (file != nullptr) dlclose(file);
  }
  Status check(cublasStatus_t status, const char* what) const {
    if (status == CUBLAS_STATUS_SUCCESS) return {};
    return fail(Code::kInternal, "{}: {}", what, cublasLtGetStatusName(status));
  }
};

struct CardGemm::Plan {
  std::shared_ptr<Library> library;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulHeuristicResult_t choice{};
  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {w, x, y}) {
      if (layout != nullptr) library->cublasLtMatrixLayoutDestroy(layout);
    }
    if (product != nullptr) library->cublasLtMatmulDescDestroy(product);
  }
};

Result<std::unique_ptr<CardGemm>> CardGemm::create(CardMemory& memory) {
  auto library = std::make_shared<Library>();
  for (const char* name : kNames) {
    if (library->file == nullptr) library->file = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library->file == nullptr) {
    return fail(Code::kUnsupported, "products on the card need {} of the CUDA toolkit: {}", kNames[0], dlerror());
  }
  const char* missing = nullptr;
#define LONGKV_CUBLAS(name)                                                               \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(library->file, #name)); \
  if (library->name == nullptr) missing = #name;
  LONGKV_CUBLAS_FUNCTIONS(LONGKV_CUBLAS)
#undef LONGKV_CUBLAS
#undef LONGKV_CUBLAS_FUNCTIONS
  if (missing != nullptr) return fail(Code::kUnsupported, "{} has no function {}", kNames[0], missing);
  std::unique_ptr<CardGemm> gemm(new CardGemm());
  gemm->library_ = library;
  cublasLtHandle_t handle = nullptr;
  LONGKV_TRY(library->check(library->cublasLtCreate(&handle), "cublasLtCreate"));
  gemm->handle_ = handle;
  LONGKV_ASSIGN(gemm->workspace_, CardBuffer::create(memory, kWorkspace, "workspace of matrix products"));
  return gemm;
}

CardGemm::~CardGemm() {
  plans_.clear();
  if (handle_ != nullptr) library_->cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

// The library counts columns first: it computes c^T = b^T a^T, so that b is its first operand.
Result<CardGemm::Plan*> CardGemm::plan(const CardProduct& p, int64_t alignment) {
  const Key key = {p.m,        p.n,        p.k,        p.a_turned + 2 * p.b_turned + 4 * p.halves,
                   p.a_stride, p.b_stride, p.c_stride, p.batch,
                   p.a_step,   p.b_step,   p.c_step,   alignment};
  if (plans_.size() >= kMostPlans && !plans_.contains(key)) plans_.clear();
  std::unique_ptr<Plan>& slot = plans_[key];
  if (slot) return slot.get();
  const Library& lib = *library_;
  auto made = std::make_unique<Plan>();
  made->library = library_;
  LONGKV_TRY(lib.check(lib.cublasLtMatmulDescCreate(&made->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product"));
  const auto turn = [&](cublasLtMatmulDescAttributes_t which, bool turned) {
    const cublasOperation_t op = turned ? CUBLAS_OP_T : CUBLAS_OP_N;
    return lib.check(lib.cublasLtMatmulDescSetAttribute(made->product, which, &op, sizeof(op)), "product");
  };
  LONGKV_TRY(turn(CUBLASLT_MATMUL_DESC_TRANSA, p.b_turned));
  LONGKV_TRY(turn(CUBLASLT_MATMUL_DESC_TRANSB, p.a_turned));
  const auto layout = [&](cublasLtMatrixLayout_t& to, cudaDataType type, int64_t rows, int64_t cols, int64_t stride,
                          int64_t step) -> Status {
    LONGKV_TRY(lib.check(lib.cublasLtMatrixLayoutCreate(&to, type, uint64_t(cols), uint64_t(rows), stride), "layout"));
    if (p.batch == 1) return {};
    const auto count = int32_t(p.batch);
    LONGKV_TRY(lib.check(
        lib.cublasLtMatrixLayoutSetAttribute(to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)), "layout"));
    return lib.check(
        lib.cublasLtMatrixLayoutSetAttribute(to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step)),
        "layout");
  };
  const cudaDataType type = p.halves ? CUDA_R_16F : CUDA_R_32F;
  LONGKV_TRY(layout(made->w, type, p.b_turned ? p.n : p.k, p.b_turned ? p.k : p.n, p.b_stride, p.b_step));
  LONGKV_TRY(layout(made->x, type, p.a_turned ? p.k : p.m, p.a_turned ? p.m : p.k, p.a_stride, p.a_step));
  LONGKV_TRY(layout(made->y, CUDA_R_32F, p.m, p.n, p.c_stride, p.c_step));
  cublasLtMatmulPreference_t preference = nullptr;
  LONGKV_TRY(lib.check(lib.cublasLtMatmulPreferenceCreate(&preference), "preference"));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
    return lib.check(lib.cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof(value)), "preference");
  };
  const auto bytes = uint32_t(alignment);
  int found = 0;
  Status s = prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, size_t(kWorkspace));
  for (const auto operand : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    if (s.ok()) s = prefer(operand, bytes);
  }
  if (s.ok()) {
    s = lib.check(lib.cublasLtMatmulAlgoGetHeuristic(static_cast<cublasLtHandle_t>(handle_), made->product, made->w,
                                                     made->x, made->y, made->y, preference, 1, &made->choice, &found),
                  "choosing an algorithm");
  }
  lib.cublasLtMatmulPreferenceDestroy(preference);
  LONGKV_TRY(s);
  if (found == 0) {
    return fail(Code::kUnsupported, "cuBLASLt has no algorithm for a product of [{} x {}] with [{} x {}]", p.m, p.k,
                p.k, p.n);
  }
  slot = std::move(made);
  return slot.get();
}

Status CardGemm::multiply(const CardProduct& product, int64_t alignment, const void* a, const void* b, float* c,
                          CardStreamHandle stream) {
  LONGKV_ASSIGN(Plan * p, plan(product, alignment));
  const float one = 1.0f, beta = product.add ? 1.0f : 0.0f;
  return library_->check(
      library_->cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), p->product, &one, b, p->w, a, p->x, &beta, c,
                               p->y, c, p->y, &p->choice.algo, workspace_.data(), size_t(kWorkspace), stream),
      "cublasLtMatmul");
}

Status CardGemm::run(const card::half_t* x, const card::half_t* w, int64_t tokens, int64_t rows, int64_t cols, bool add,
                     float* y, int64_t y_stride, CardStreamHandle stream) {
  CardProduct p{tokens, rows, cols, false, true, cols, cols, y_stride};
  p.halves = true;
  p.add = add;
  return run(p, x, w, y, stream);
}

int64_t CardGemm::alignment(const CardProduct& p, const void* a, const void* b, const float* c) {
  uintptr_t places = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c) |
                     uintptr_t(kBufferAlignment);
  const int bytes = p.halves ? 2 : 4;
  if (p.batch > 1) places |= uintptr_t(p.a_step * bytes) | uintptr_t(p.b_step * bytes) | uintptr_t(p.c_step * 4);
  return int64_t(places & (~places + 1));
}

Status CardGemm::run(const CardProduct& p, const void* a, const void* b, float* c, CardStreamHandle stream) {
  if (p.m <= 0 || p.n <= 0 || p.k <= 0 || p.batch <= 0) return {};
  return multiply(p, alignment(p, a, b, c), a, b, c, stream);
}

}  // namespace longkv

#endif
