/* A Vulkan layer that mends the shared memory of CubeCL 0.11.3's SPIR-V.
 *
 * On a device without VK_KHR_workgroup_memory_explicit_layout, which the software drivers lack, CubeCL
 * declares each shared array as a variable that holds a pointer to the array, and then indexes it as if it
 * were the array:
 *
 *     %array   = OpTypeArray ...
 *     %pointer = OpTypePointer Workgroup %array
 *     %outer   = OpTypePointer Workgroup %pointer
 *     %shared  = OpVariable %outer Workgroup        should be: OpVariable %pointer Workgroup
 *
 * Mesa's lavapipe crashes on that, and in SwiftShader the arrays overlap and matrix products come out wrong.
 * The layer gives such variables the right type, one word each, and leaves every other module as it is.
 *
 * With BURN_FLASH_ATTENTION_WEBGPU=1 in the environment the device passes for one of WebGPU's smallest: it
 * hides buffer device addresses, without which CubeCL compiles to WGSL, and reports no more than the limits
 * that WebGPU guarantees. One build then tests both compilers and both ends of the limits.
 *
 * It serves a process that uses one driver: the functions of the next layer are kept in plain globals.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

static PFN_vkGetInstanceProcAddr next_instance_function;
static PFN_vkGetDeviceProcAddr next_device_function;
static PFN_vkCreateDevice next_create_device;
static PFN_vkCreateShaderModule next_create_shader_module;
static PFN_vkGetPhysicalDeviceFeatures2 next_features;
static PFN_vkGetPhysicalDeviceProperties next_properties;
static PFN_vkGetPhysicalDeviceProperties2 next_properties2;

/* From the SPIR-V specification, sections 2.3, 3.52.6 and 3.52.8. */
enum { HEADER_WORDS = 5, BOUND = 3, OP_TYPE_POINTER = 32, OP_VARIABLE = 59, WORKGROUP = 4 };

/* `pointee` has a zero for each id the module may use. */
static void mend(uint32_t *code, size_t words, uint32_t *pointee) {
    for (size_t at = HEADER_WORDS; at < words;) {
        uint32_t *instruction = code + at;
        uint32_t length = instruction[0] >> 16;
        uint32_t opcode = instruction[0] & 0xffff;
        if (length == 0 || length > words - at)
            return;
        if (opcode == OP_TYPE_POINTER && instruction[2] == WORKGROUP) {
            pointee[instruction[1]] = instruction[3];
        } else if (opcode == OP_VARIABLE && instruction[3] == WORKGROUP) {
            uint32_t inner = pointee[instruction[1]];
            if (pointee[inner] != 0)
                instruction[1] = inner;
        }
        at += length;
    }
}

static VKAPI_ATTR VkResult VKAPI_CALL create_shader_module(VkDevice device,
                                                           const VkShaderModuleCreateInfo *info,
                                                           const VkAllocationCallbacks *allocator,
                                                           VkShaderModule *module) {
    size_t words = info->codeSize / sizeof(uint32_t);
    if (words < HEADER_WORDS)
        return next_create_shader_module(device, info, allocator, module);
    VkResult result = VK_ERROR_OUT_OF_HOST_MEMORY;
    uint32_t *code = malloc(info->codeSize);
    uint32_t *pointee = calloc(info->pCode[BOUND], sizeof(uint32_t));
    if (code != NULL && pointee != NULL) {
        memcpy(code, info->pCode, info->codeSize);
        mend(code, words, pointee);
        VkShaderModuleCreateInfo mended = *info;
        mended.pCode = code;
        result = next_create_shader_module(device, &mended, allocator, module);
    }
    free(pointee);
    free(code);
    return result;
}

static int webgpu(void) {
    const char *set = getenv("BURN_FLASH_ATTENTION_WEBGPU");
    return set != NULL && strcmp(set, "1") == 0;
}

static VKAPI_ATTR void VKAPI_CALL features(VkPhysicalDevice physical, VkPhysicalDeviceFeatures2 *found) {
    next_features(physical, found);
    if (!webgpu())
        return;
    for (VkBaseOutStructure *next = found->pNext; next != NULL; next = next->pNext)
        if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_BUFFER_DEVICE_ADDRESS_FEATURES)
            ((VkPhysicalDeviceBufferDeviceAddressFeatures *)next)->bufferDeviceAddress = VK_FALSE;
}

static void at_most(uint32_t *limit, uint32_t guaranteed) {
    if (*limit > guaranteed)
        *limit = guaranteed;
}

/* From the WebGPU specification, section 3.6.2, the column of default limits. */
static void lower(VkPhysicalDeviceLimits *limits) {
    static const uint32_t sizes[3] = {256, 256, 64};
    if (!webgpu())
        return;
    at_most(&limits->maxPerStageDescriptorStorageBuffers, 8);
    at_most(&limits->maxComputeSharedMemorySize, 16384);
    at_most(&limits->maxComputeWorkGroupInvocations, 256);
    for (int axis = 0; axis < 3; axis++) {
        at_most(&limits->maxComputeWorkGroupSize[axis], sizes[axis]);
        at_most(&limits->maxComputeWorkGroupCount[axis], 65535);
    }
}

static VKAPI_ATTR void VKAPI_CALL properties(VkPhysicalDevice physical, VkPhysicalDeviceProperties *found) {
    next_properties(physical, found);
    lower(&found->limits);
}

static VKAPI_ATTR void VKAPI_CALL properties2(VkPhysicalDevice physical, VkPhysicalDeviceProperties2 *found) {
    next_properties2(physical, found);
    lower(&found->properties.limits);
}

static VKAPI_ATTR VkResult VKAPI_CALL create_instance(const VkInstanceCreateInfo *info,
                                                      const VkAllocationCallbacks *allocator,
                                                      VkInstance *instance) {
    VkLayerInstanceCreateInfo *chain = (VkLayerInstanceCreateInfo *)info->pNext;
    while (chain != NULL && !(chain->sType == VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO &&
                              chain->function == VK_LAYER_LINK_INFO))
        chain = (VkLayerInstanceCreateInfo *)chain->pNext;
    if (chain == NULL)
        return VK_ERROR_INITIALIZATION_FAILED;
    next_instance_function = chain->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    chain->u.pLayerInfo = chain->u.pLayerInfo->pNext;
    PFN_vkCreateInstance next = (PFN_vkCreateInstance)next_instance_function(NULL, "vkCreateInstance");
    VkResult result = next(info, allocator, instance);
    if (result == VK_SUCCESS) {
        next_create_device = (PFN_vkCreateDevice)next_instance_function(*instance, "vkCreateDevice");
        next_features = (PFN_vkGetPhysicalDeviceFeatures2)next_instance_function(
            *instance, "vkGetPhysicalDeviceFeatures2");
        next_properties = (PFN_vkGetPhysicalDeviceProperties)next_instance_function(
            *instance, "vkGetPhysicalDeviceProperties");
        next_properties2 = (PFN_vkGetPhysicalDeviceProperties2)next_instance_function(
            *instance, "vkGetPhysicalDeviceProperties2");
    }
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL create_device(VkPhysicalDevice physical, const VkDeviceCreateInfo *info,
                                                    const VkAllocationCallbacks *allocator, VkDevice *device) {
    VkLayerDeviceCreateInfo *chain = (VkLayerDeviceCreateInfo *)info->pNext;
    while (chain != NULL && !(chain->sType == VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO &&
                              chain->function == VK_LAYER_LINK_INFO))
        chain = (VkLayerDeviceCreateInfo *)chain->pNext;
    if (chain == NULL)
        return VK_ERROR_INITIALIZATION_FAILED;
    next_device_function = chain->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    chain->u.pLayerInfo = chain->u.pLayerInfo->pNext;
    VkResult result = next_create_device(physical, info, allocator, device);
    if (result == VK_SUCCESS)
        next_create_shader_module =
            (PFN_vkCreateShaderModule)next_device_function(*device, "vkCreateShaderModule");
    return result;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL device_function(VkDevice device, const char *name) {
    if (strcmp(name, "vkGetDeviceProcAddr") == 0)
        return (PFN_vkVoidFunction)device_function;
    if (strcmp(name, "vkCreateShaderModule") == 0)
        return (PFN_vkVoidFunction)create_shader_module;
    return next_device_function(device, name);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL instance_function(VkInstance instance, const char *name) {
    if (strcmp(name, "vkGetInstanceProcAddr") == 0)
        return (PFN_vkVoidFunction)instance_function;
    if (strcmp(name, "vkCreateInstance") == 0)
        return (PFN_vkVoidFunction)create_instance;
    if (strcmp(name, "vkCreateDevice") == 0)
        return (PFN_vkVoidFunction)create_device;
    if (strcmp(name, "vkGetDeviceProcAddr") == 0)
        return (PFN_vkVoidFunction)device_function;
    if (strcmp(name, "vkCreateShaderModule") == 0)
        return (PFN_vkVoidFunction)create_shader_module;
    if (strcmp(name, "vkGetPhysicalDeviceFeatures2") == 0 || strcmp(name, "vkGetPhysicalDeviceFeatures2KHR") == 0)
        return (PFN_vkVoidFunction)features;
    if (strcmp(name, "vkGetPhysicalDeviceProperties") == 0)
        return (PFN_vkVoidFunction)properties;
    if (strcmp(name, "vkGetPhysicalDeviceProperties2") == 0 ||
        strcmp(name, "vkGetPhysicalDeviceProperties2KHR") == 0)
        return (PFN_vkVoidFunction)properties2;
    return next_instance_function(instance, name);
}

VKAPI_ATTR VkResult VKAPI_CALL vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface *interface) {
    interface->loaderLayerInterfaceVersion = 2;
    interface->pfnGetInstanceProcAddr = instance_function;
    interface->pfnGetDeviceProcAddr = device_function;
    interface->pfnGetPhysicalDeviceProcAddr = NULL;
    return VK_SUCCESS;
}
