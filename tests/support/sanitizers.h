// Whether this program is built with a sanitizer, under which bounds on time and on resident memory mean nothing.
#pragma once

namespace longkv::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace longkv::test
