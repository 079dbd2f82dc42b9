package event

// Ref names an entity at one of its versions: a pair of follows, a comment, or the settings of a post's thread. Its JSON is short,
// because it travels in headers.
type Ref struct {
	Type     string `json:"k"` // the aggregate type that its events are of
	Follower ID     `json:"a,omitempty"`
	Followee ID     `json:"b,omitempty"`
	Comment  string `json:"c,omitempty"`
	Thread   ID     `json:"t,omitempty"` // the post
	Version  int64  `json:"v"`
}

// Ref names the pair as it is.
func (f Follow) Ref() Ref {
	return Ref{Type: AggregateFollow, Follower: f.FollowerID, Followee: f.FolloweeID, Version: f.Version}
}

// Ref names the comment as it is.
func (c Comment) Ref() Ref {
	return Ref{Type: AggregateComment, Comment: c.CommentID, Version: c.Version}
}

// Ref names the settings as they are.
func (t Thread) Ref() Ref { return Ref{Type: AggregateThread, Thread: t.PostID, Version: t.Version} }
