package api

func wordsOfComments() kindWords {
	return kindWords{
		operations: map[string]words{
			"settings":     {id: "get-thread", summary: "Read the settings of a post's thread"},
			"put settings": {id: "put-thread", summary: "Set the settings of a post's thread"},
			"settings versions": {id: "list-thread-versions",
				summary: "List the versions of the settings of a post's thread, newest first"},
		},
		paths: map[string]string{
			"pending":  "/v1/moderation/pending",
			"settings": "/v1/posts/{object_id}/thread", "put settings": "/v1/posts/{object_id}/thread",
			"settings versions": "/v1/posts/{object_id}/thread/versions",
		},
		schemas: map[string]string{
			"Input": "CreateInputBody", "Edit": "EditInputBody", "CreateOperation": "CreateOperation", "EditOperation": "EditOperation",
			"DeleteOperation": "DeleteOperation",
			"Page":            "ThreadPage", "InTree": "TreeComment", "Tree": "Tree", "BySlug": "ThreadComment", "Summary": "ThreadSummary",
			"ThreadState": "ThreadState", "Settings": "ThreadSettings", "SettingsVersion": "ThreadVersion",
			"SettingsVersions": "ThreadVersions",
		},
		names: map[string]string{"settings": "thread"},
		codes: map[string]string{codeChildGone: codeCommentGone},
	}
}
