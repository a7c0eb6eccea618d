# `cmake --install`: the library, its public headers, the program, and what find_package and pkg-config need.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS longkv EXPORT longkv-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET longkv_cli)
  install(TARGETS longkv_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/longkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/recipes DESTINATION ${CMAKE_INSTALL_DATADIR}/longkv OPTIONAL)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/longkv)
install(EXPORT longkv-targets NAMESPACE longkv:: DESTINATION ${config_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/longkv-config.cmake.in ${CMAKE_BINARY_DIR}/longkv-config.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/longkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/longkv-config.cmake ${CMAKE_BINARY_DIR}/longkv-config-version.cmake
        DESTINATION ${config_dir})

# The library is static, so a program that links it needs its dependencies too.
set(LONGKV_PC_LIBS "-lhwy -lyaml-cpp -lfmt -lxxhash -lzstd -lz -lcpp-httplib -lstdc++ -lm -lpthread")
if(LONGKV_WITH_ONEDNN)
  string(APPEND LONGKV_PC_LIBS " -ldnnl -lgomp")
endif()
if(LONGKV_HAS_CUDA)
  string(APPEND LONGKV_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl")
endif()
# Found from the file's own place, so that `cmake --install --prefix` needs no new configuration.
file(RELATIVE_PATH LONGKV_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/longkv.pc.in ${CMAKE_BINARY_DIR}/longkv.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/longkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
