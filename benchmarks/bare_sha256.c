/* What libcrypto needs for the bytes of a hash chain and nothing else: the floor of hashing. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>
#include <string.h>

void chain(long num_blocks, unsigned long message_bytes, unsigned char *digest) {
    unsigned char message[256] = {0};
    for (long block = 0; block < num_blocks; block++) {
        SHA256_CTX context;
        memcpy(message, digest, SHA256_DIGEST_LENGTH);
        SHA256_Init(&context);
        SHA256_Update(&context, message, message_bytes);
        SHA256_Final(digest, &context);
    }
}
