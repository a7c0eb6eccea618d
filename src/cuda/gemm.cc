#ifdef LONGKV_WITH_CUDA

#include "cuda/gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include "base/error.h"

namespace longkv {

namespace {
constexpr const char* kNames[] = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};
}  // namespace

// The functions of the library that are used.
#define LONGKV_CUBLAS_FUNCTIONS(use)                                                                           \
  use(cublasLtCreate) use(cublasLtDestroy) use(cublasLtGetStatusName) use(cublasLtMatmul)                      \
      use(cublasLtMatmulAlgoGetHeuristic) use(cublasLtMatmulDescCreate) use(cublasLtMatmulDescDestroy)         \
          use(cublasLtMatmulDescSetAttribute) use(cublasLtMatrixLayoutCreate) use(cublasLtMatrixLayoutDestroy) \
              use(cublasLtMatmulPreferenceCreate) use(cublasLtMatmulPreferenceDestroy)                         \
                  use(cublasLtMatmulPreferenceSetAttribute)

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
    return fail(Code::kUnsupported, "products of prompts on the card need {} of the CUDA toolkit: {}", kNames[0],
                dlerror());
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

// The library counts columns first: it computes y^T [rows x tokens] = w [cols x rows]^T x [cols x tokens].
Result<CardGemm::Plan*> CardGemm::plan(int64_t tokens, int64_t rows, int64_t cols, int64_t y_stride) {
  std::unique_ptr<Plan>& slot = plans_[{tokens, rows, cols, y_stride}];
  if (slot) return slot.get();
  const Library& lib = *library_;
  auto made = std::make_unique<Plan>();
  made->library = library_;
  LONGKV_TRY(lib.check(lib.cublasLtMatmulDescCreate(&made->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product"));
  const cublasOperation_t turned = CUBLAS_OP_T;
  LONGKV_TRY(
      lib.check(lib.cublasLtMatmulDescSetAttribute(made->product, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof(turned)),
                "product"));
  const auto r = uint64_t(rows), c = uint64_t(cols), t = uint64_t(tokens);
  LONGKV_TRY(lib.check(lib.cublasLtMatrixLayoutCreate(&made->w, CUDA_R_16F, c, r, cols), "layout"));
  LONGKV_TRY(lib.check(lib.cublasLtMatrixLayoutCreate(&made->x, CUDA_R_16F, c, t, cols), "layout"));
  LONGKV_TRY(lib.check(lib.cublasLtMatrixLayoutCreate(&made->y, CUDA_R_32F, r, t, y_stride), "layout"));
  cublasLtMatmulPreference_t preference = nullptr;
  LONGKV_TRY(lib.check(lib.cublasLtMatmulPreferenceCreate(&preference), "preference"));
  const auto workspace = size_t(kWorkspace);
  int found = 0;
  Status s = lib.check(lib.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                                &workspace, sizeof(workspace)),
                       "preference");
  if (s.ok()) {
    s = lib.check(lib.cublasLtMatmulAlgoGetHeuristic(static_cast<cublasLtHandle_t>(handle_), made->product, made->w,
                                                     made->x, made->y, made->y, preference, 1, &made->choice, &found),
                  "choosing an algorithm");
  }
  lib.cublasLtMatmulPreferenceDestroy(preference);
  LONGKV_TRY(s);
  if (found == 0) {
    return fail(Code::kUnsupported, "cuBLASLt has no algorithm for a product of {} tokens, {} x {}", tokens, rows,
                cols);
  }
  slot = std::move(made);
  return slot.get();
}

Status CardGemm::run(const card::half_t* x, const card::half_t* w, int64_t tokens, int64_t rows, int64_t cols, bool add,
                     float* y, int64_t y_stride, CardStreamHandle stream) {
  LONGKV_ASSIGN(Plan * p, plan(tokens, rows, cols, y_stride));
  const float one = 1.0f, beta = add ? 1.0f : 0.0f;
  return library_->check(
      library_->cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), p->product, &one, w, p->w, x, p->x, &beta, y,
                               p->y, y, p->y, &p->choice.algo, workspace_.data(), size_t(kWorkspace), stream),
      "cublasLtMatmul");
}

}  // namespace longkv

#endif
