package coldstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// partBytes is the size of the parts in which an object is sent, each held in memory. S3 accepts
// 10,000 parts.
const partBytes = 16 << 20

// s3 stores objects in a bucket of S3, or of a store that speaks its protocol.
type s3 struct {
	client         *minio.Client
	bucket, prefix string
}

func openS3(u *url.URL) (*s3, error) {
	q := u.Query()
	endpoint, secure := "s3.amazonaws.com", true
	if e := cmp.Or(q.Get("endpoint"), os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL")); e != "" {
		at, err := url.Parse(e)
		if err != nil || at.Host == "" || at.Scheme != "https" && at.Scheme != "http" {
			return nil, fmt.Errorf("the endpoint is %q, want https://HOST", e)
		}
		endpoint, secure = at.Host, at.Scheme == "https"
	}
	look := minio.BucketLookupDNS
	if q.Get("use_path_style") == "true" {
		look = minio.BucketLookupPath
	}
	client, err := minio.New(endpoint, &minio.Options{
		Secure: secure, Region: cmp.Or(q.Get("region"), os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")),
		BucketLookup: look, MaxRetries: 3,
		// Credentials come from the environment, else the file of profiles, else the role of the
		// pod, container or machine.
		Creds: credentials.NewChainCredentials([]credentials.Provider{&credentials.EnvAWS{},
			&credentials.FileAWSCredentials{}, &credentials.IAM{}}),
	})
	if err != nil {
		return nil, err
	}
	return &s3{client, u.Host, q.Get("prefix")}, nil
}

func (*s3) close() error { return nil }

// s3Upload is an object that is sent to S3 while it is written.
type s3Upload struct {
	*io.PipeWriter
	done chan error // receives the outcome once
}

var errAborted = errors.New("aborted")

func (s *s3) create(ctx context.Context, key, contentType string) (upload, error) {
	r, w := io.Pipe()
	u := &s3Upload{w, make(chan error, 1)}
	go func() {
		_, err := s.client.PutObject(ctx, s.bucket, s.prefix+key, r, -1,
			minio.PutObjectOptions{ContentType: contentType, PartSize: partBytes, SendContentMd5: true, DisableContentSha256: true})
		r.CloseWithError(cmp.Or(err, io.ErrClosedPipe)) // the next write returns err
		u.done <- err
	}()
	return u, nil
}

func (u *s3Upload) commit() error {
	_ = u.Close() // a pipe has no error
	err := <-u.done
	u.done <- errAborted // for a later abort
	return err
}

func (u *s3Upload) abort() {
	u.CloseWithError(errAborted)
	u.done <- <-u.done
}

func (s *s3) open(ctx context.Context, key string) (io.ReadCloser, error) {
	o, err := s.client.GetObject(ctx, s.bucket, s.prefix+key, minio.GetObjectOptions{})
	if err != nil {
		return nil, err
	}
	return s3Download{o}, nil
}

// s3Download maps a missing object to fs.ErrNotExist, as files do. S3 reports it at the first read.
type s3Download struct{ *minio.Object }

func (r s3Download) Read(p []byte) (int, error) {
	n, err := r.Object.Read(p)
	if err != nil && isNotFound(err) {
		err = fs.ErrNotExist
	}
	return n, err
}

func isNotFound(err error) bool {
	var answer minio.ErrorResponse
	return errors.As(err, &answer) && answer.StatusCode == http.StatusNotFound
}

func (s *s3) copy(ctx context.Context, to, from string) error {
	_, err := s.client.CopyObject(ctx, minio.CopyDestOptions{Bucket: s.bucket, Object: s.prefix + to},
		minio.CopySrcOptions{Bucket: s.bucket, Object: s.prefix + from})
	return err
}

func (s *s3) list(ctx context.Context, prefix string) (keys []string, err error) {
	for o := range s.client.ListObjectsIter(ctx, s.bucket, minio.ListObjectsOptions{Prefix: s.prefix + prefix, Recursive: true}) {
		if o.Err != nil {
			return nil, o.Err
		}
		keys = append(keys, o.Key[len(s.prefix):])
	}
	return keys, nil
}

func (s *s3) delete(ctx context.Context, keys []string) error {
	for _, key := range keys {
		if err := s.client.RemoveObject(ctx, s.bucket, s.prefix+key, minio.RemoveObjectOptions{}); err != nil && !isNotFound(err) {
			return err
		}
	}
	return nil
}

// uploads lists multipart uploads that nobody completed. Their parts may hold text.
func (s *s3) uploads(ctx context.Context, prefix string) (keys []string, err error) {
	for u := range s.client.ListIncompleteUploads(ctx, s.bucket, s.prefix+prefix, true) {
		if err = cmp.Or(err, u.Err); u.Err == nil { // read to the end: the sender waits
			keys = append(keys, u.Key[len(s.prefix):])
		}
	}
	return keys, err
}

func (s *s3) cancel(ctx context.Context, keys []string) error {
	for _, key := range keys {
		if err := s.client.RemoveIncompleteUpload(ctx, s.bucket, s.prefix+key); err != nil && !isNotFound(err) {
			return err
		}
	}
	return nil
}

func (*s3) forget(string) error { return nil }
